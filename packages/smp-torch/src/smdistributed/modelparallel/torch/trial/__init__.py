"""What a call does, tried apart from the job."""
