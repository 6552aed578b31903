"""Failures while serving, each with real processes. The other ranks name the rank and the cause within the time-out
plus five seconds, nothing hangs, no resources are left, and the next run works.

======================================================================  ==============================================
what goes wrong                                                         where it is tested
======================================================================  ==============================================
a rank is killed: before it loads, while it loads, before a collective,
within one; it stops (SIGSTOP); it is slower than the others wait       test_dying_ranks
all ranks stop at once for longer than they wait                        test_dying_ranks
the same for each transport, group and mesh, below the partition        tests/runtime/test_communicator
another build, version, world size, shape or number of inputs           test_disagreeing_ranks
two jobs at once, with a port each or with one                          test_disagreeing_ranks
the port is taken by another program; a rank never comes, or twice      tests/runtime/test_rendezvous
another secret, or none where one is needed                             tests/runtime/test_rendezvous
strangers and garbage at the port                                       tests/runtime/test_store
no room in /dev/shm, for a segment, for descriptors                     test_scarce_resources
each file of the artifacts with a bit flipped, cut, empty or missing;
a folder that may only be read, or is replaced while it is loaded;
weights that are cut or written to while they are in use                test_damaged_artifacts
mapped files that are cut, below the partition                          tests/runtime/test_mapped_file
names and links that lead out of the folder; foreign kernels            test_damaged_artifacts
a build that is killed while it writes                                  tests/artifacts/test_bad_input
very many calls of random sizes (slow)                                  test_soak
======================================================================  ==============================================
"""
