"""Parameter-efficient fine-tuning: the model's weights stay as they are, and small adapters beside them are trained."""
