"""Install a device on a Raspberry Pi: plan the files of a bundle, and write them to a card, an image, a folder or over ssh."""
