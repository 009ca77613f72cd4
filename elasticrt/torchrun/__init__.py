"""The rendezvous as a plug-in for torchrun: agents and workers are torchrun's, the agreement is ours."""
