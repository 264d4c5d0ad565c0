"""The fleet's own certificate authority: who is issued what, and who is refused from now on."""
