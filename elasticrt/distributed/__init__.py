"""Process groups: who am I, how ranks wait for each other, and how a group is left and made anew."""
