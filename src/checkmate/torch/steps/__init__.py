"""The steps of a training loop, of one Dynamo graph or several: recorded, known again, and planned as one within a budget."""
