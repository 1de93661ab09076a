"""OpenAI's Files and Batch APIs: many requests in a file, answered in the background and resumed after a crash."""
