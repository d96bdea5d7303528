"""The tuned model as files that other programs run, checked before they take their place."""
