"""Callbacks for trainers that delete their own checkpoints. Each needs its trainer, so nothing is imported here."""
