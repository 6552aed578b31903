/*
 * What launchers need of hidet's runtime. hidet's header of these (hidet 0.6.1, hidet/runtime/symbols.h) includes parts
 * of the C++ library that take longer to compile than the rest of a launcher.
 */
#ifndef HIDET_DIST_SYMBOLS_H
#define HIDET_DIST_SYMBOLS_H

#include <stdint.h>

#ifndef DLL
#define DLL extern "C" __attribute__((visibility("default")))
#endif

/* Returns the present value of a symbolic dim. */
DLL int32_t get_symbol_value(const char *symbol_name);

#endif
