"""Training's side: the order of an epoch, a data set, and batches on their way to the trainer."""
