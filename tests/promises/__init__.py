"""What a user can rely on, as commands that a user types.

Above each test stands the number of its promise. The tests know the commands, `import tutti`, and the
documented files of a run folder; nothing else, so they hold whatever the code inside becomes.

1.  One command trains alone or in parallel, and times each stage; a comparison puts all ways side by side.
2.  N ranks give the weights of sequential training, to 1e-12 in float64, also where samples do not divide.
3.  The classroom's sigmoid network on Fashion-MNIST, with a training, a validation and a test part.
4.  CPU against GPU, with copies timed apart. Not here: it needs a GPU (tests/gpu, benchmarks/gpu.py).
5.  One model on several ranks (tensor, pipeline, sharded): less memory for each, the same weights.
6.  Hogwild on shared weights, dense and sparse.
7.  Models x schedules x folds side by side; folds are bit-equal for any number of blocks and after a kill.
8.  The schedules of torch by name, restarts and plateaus included.
9.  Checkpoints, newest and best, checked by SHA-256; a run resumes in mid-epoch on any number of ranks.
10. A confusion matrix, the accuracy of each class, the use of the cores, the loss over time, the speed-up.
11. The known models train by their names.
12. Synchronous all-reduce by ring, tree, torus and others; compressed gradients; adasum.
13. Parameter servers: with a quorum, Downpour, lazy; elastic averaging; energy matching; two levels.
14. Local SGD, DiLoCo, gossip, AD-PSGD.
15. Large batches: LARS, LAMB, warm-up, linear scaling, accumulation.
16. Staleness is measured, and remedied.
17. Accuracy against scale on virtual ranks, with real gradients and the same bits each time.
18. Three lines make a loop of torch parallel, several models included.
19. A search over blocks of ranks, with folds inside and trials that end early; ensembles.
20. A slow rank gets less work, a lost one does not end the run, a hung one is named. The loss of a host is
    not here: it needs network namespaces (tests/cluster/test_lost_host.py).
21. A running training grows and shrinks.
22. Validation beside training; evaluation counts each sample once under every strategy.
23. The update of a centre is about as fast as torch's fused Adam. Not here: benchmarks/centre.py measures it.
24. One trace of all ranks on one clock.
25. Lists of HDF5 files, a queue of batches, data that stay in their files.
26. Models of Keras, Hugging Face and torch.export in; ONNX out.
27. Early stopping; history as JSON and CSV, in TensorBoard and MLflow.
28. Programs of torch.distributed run by `init_process_group("tutti")` on torch's own wheel.
29. The efficiency of 1, 2 and 4 processes in a table. Not here: examples/efficiency.py, which
    tests/docs/test_lessons.py runs.
30. torchrun, mpirun and the tasks of a job array. Not here: a real Slurm (tests/cluster/test_slurm.py) and
    notebooks (tests/docs/test_notebook.py).
31. Data in many formats; missing values, several inputs, sequences.
32. Predictions, evaluations, exports, and estimators of scikit-learn.
33. A plan picks ranks, threads, layout and precision by measuring.
34. Nothing hangs, nothing is left behind, the traceback of the rank that failed is last, and a wrong word
    is told the nearest right one.
35. On one host nothing listens; a foreign run folder runs no code.
"""
