"""Images as arrays: datasets, their partition over clients, and one client's train, validation and test split. Torch-free."""
