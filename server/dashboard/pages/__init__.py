"""What each page looks like: HTML made of values, without a look at the registry or at a browser."""
