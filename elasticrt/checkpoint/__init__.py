"""The training state: taken, stored, committed, found again, and sent from those who have it."""
