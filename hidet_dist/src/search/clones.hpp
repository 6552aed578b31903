// Functions that are compiled for several processors; the one for the processor at hand is taken when the library loads.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HIDET_DIST_CLONES(...) __attribute__((target_clones(__VA_ARGS__, "default")))
#else
#define HIDET_DIST_CLONES(...)
#endif
