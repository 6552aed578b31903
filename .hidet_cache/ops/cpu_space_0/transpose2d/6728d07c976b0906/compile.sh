#!/bin/bash

/usr/bin/g++ -I/work/main/.venv/lib/python3.11/site-packages/hidet/include -L/work/main/.venv/lib/python3.11/site-packages/hidet/lib -O3 -std=c++11 -mavx2 -m64 -ffast-math -march=znver3 -fPIC -fopenmp -Wl,--no-as-needed -lhidet_runtime -shared  /work/main/.hidet_cache/ops/cpu_space_0/transpose2d/6728d07c976b0906/source.cc -o /work/main/.hidet_cache/ops/cpu_space_0/transpose2d/6728d07c976b0906/lib.so
