"""What the agent is made of, pure: its state, what reaches it, what it asks for, and its outbox."""
