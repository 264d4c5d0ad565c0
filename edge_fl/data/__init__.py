"""Image datasets as arrays, their partition over clients, and a client's train, validation and test split; without torch."""
