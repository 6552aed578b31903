"""What importing the package gives."""

import hidet

import hidet_dist


def test_importing_it_adds_the_calls_to_hidet_distributed():
    for name in ("auto_parallel", "partition", "load_partition", "init", "shutdown"):
        assert getattr(hidet.distributed, name) is getattr(hidet_dist, name)
    for name in ("DeviceMesh", "TensorShardSpec", "OpShardSpec", "ReduceFn", "Plan"):
        assert getattr(hidet.distributed, name) is getattr(hidet_dist, name)
    assert callable(hidet.distributed.init_process_group)  # hidet's own calls are left as they were


def test_every_error_of_the_project_has_one_root():
    from hidet_dist import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert len(classes) > 10
    assert all(issubclass(c, errors.HidetDistError) for c in classes)
