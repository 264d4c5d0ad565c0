"""The server's side of the wire: one connection, who is there, what is asked of them, and which answers count."""
