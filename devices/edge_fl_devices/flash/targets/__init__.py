"""Where a bundle can be written: a mounted boot partition, an image or card, a plain folder, or a Pi over ssh."""
