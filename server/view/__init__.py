"""What a person sees: pictures of data, of learning and of features."""
