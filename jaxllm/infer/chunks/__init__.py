"""Parts of prompts that several have: chunks reused at any position (Cache-Craft), common pages read once."""
