"""When each action of a schedule starts and ends, and pictures of that."""
