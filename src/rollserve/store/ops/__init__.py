"""What the store does, by topic: functions of one transaction. They know nothing of threads."""
