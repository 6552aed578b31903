/* What all solvers of the library have in common. */
#ifndef HIDET_DIST_SEARCH_SOLVERS_H
#define HIDET_DIST_SEARCH_SOLVERS_H

#include <stdint.h>

#include "hidet_dist/visibility.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a declaration of the headers in this folder changes. */
#define HIDET_DIST_SEARCH_ABI_VERSION 2

/* The version that the library was built with. */
HIDET_DIST_API int32_t hidet_dist_search_abi_version(void);

/* What failed last on the calling thread, or an empty string. */
HIDET_DIST_API const char *hidet_dist_search_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
