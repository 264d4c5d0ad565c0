"""Round requests and the updates that answer them: inbox, validation, head updates, workers."""
