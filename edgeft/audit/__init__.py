"""What an honest but curious server could read from what a device would send: attacks on this user's own rows."""
