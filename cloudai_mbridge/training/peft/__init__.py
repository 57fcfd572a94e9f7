"""Parameter-efficient fine-tuning: the model's weights are frozen, and small adapters next to them are trained."""
