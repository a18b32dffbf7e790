"""mxamp through the APIs of other AMP libraries: Apex, Paddle, TensorFlow, `mxnet.contrib.amp`."""
