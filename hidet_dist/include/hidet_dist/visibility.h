/* The functions that the libraries export. */
#ifndef HIDET_DIST_VISIBILITY_H
#define HIDET_DIST_VISIBILITY_H

#if defined(HIDET_DIST_BUILD)
#define HIDET_DIST_API __attribute__((visibility("default")))
#else
#define HIDET_DIST_API
#endif

#endif
