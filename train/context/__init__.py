"""What the train function sees: ``TrainContext`` and the functions that find it by themselves."""
