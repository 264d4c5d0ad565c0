"""Fleets: the one seam between simulation and deployment. A fleet brings a method to its clients and their updates back."""
