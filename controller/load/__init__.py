"""What is believed of each rank's load, and the least loaded of them."""
