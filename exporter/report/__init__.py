"""`sinkring report`: what was exported and how it was found to be, as one HTML page that needs nothing else."""
