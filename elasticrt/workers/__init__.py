"""The worker processes of a node, as its agent sees them: started, listened to, stopped, their ends explained."""
