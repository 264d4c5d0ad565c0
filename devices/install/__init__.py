"""A release on its way in: fetched, verified, tried out in a child with limits, and put into the other slot."""
