"""Process groups: this process's rank, how ranks wait for each other, and how a group is left and made anew."""
