/*
 * Variable elimination: the least sum of tables over variables that take a few values each.
 *
 * Eliminating a variable adds up the tables that it occurs in and takes the minimum over it, which leaves a table over
 * its neighbours (Bertele and Brioschi, Nonserial Dynamic Programming, 1972). Its least entry is subtracted, so that
 * the tables of repeated blocks become equal; tables are numbered by content, and an elimination of the same tables in
 * the same way is looked up.
 *
 * Entries are finite or infinite, not NaN. Sums of entries must be exact in double precision: then they do not depend on
 * the order of addition.
 */
#ifndef HIDET_DIST_SEARCH_ELIMINATION_H
#define HIDET_DIST_SEARCH_ELIMINATION_H

#include <stdint.h>

#include "hidet_dist/visibility.h"

#ifdef __cplusplus
extern "C" {
#endif

enum hidet_dist_elimination_status {
  HIDET_DIST_ELIMINATED = 0,
  HIDET_DIST_ELIMINATION_STOPPED = 1,   /* the callback said so */
  HIDET_DIST_ELIMINATION_TOO_WIDE = 2,  /* a table does not fit the limit of bytes, or a step has too much work */
  HIDET_DIST_ELIMINATION_NO_MEMORY = 3
};

/* Called now and then; a result other than 0 stops the function that called it. */
typedef int32_t (*hidet_dist_elimination_stop)(void);

/* Tables in row-major order, numbered by content: equal tables have one number. Not for several threads at once. */
typedef struct hidet_dist_tables hidet_dist_tables;

/* Makes an empty store of tables that take at most `byte_limit` bytes. Returns NULL if memory runs out. */
HIDET_DIST_API hidet_dist_tables *hidet_dist_tables_create(int64_t byte_limit);
HIDET_DIST_API void hidet_dist_tables_destroy(hidet_dist_tables *tables);

/* Copies a table, unless there is an equal one, and returns its number; -1 if memory runs out. */
HIDET_DIST_API int64_t hidet_dist_tables_add(hidet_dist_tables *tables, int32_t dims, const int64_t *shape,
                                             const double *entries);
HIDET_DIST_API int64_t hidet_dist_tables_bytes(const hidet_dist_tables *tables);

/* Writes the sizes of a table's dims, at most 64, and returns their number. */
HIDET_DIST_API int32_t hidet_dist_tables_shape(const hidet_dist_tables *tables, int64_t number, int64_t *shape);

/* Returns the entries of a table, which stay where they are until the store is destroyed. */
HIDET_DIST_API const double *hidet_dist_tables_entries(const hidet_dist_tables *tables, int64_t number);

/* Variables, and factors: tables with a variable for each of their dims. */
typedef struct hidet_dist_network hidet_dist_network;

/* Factor f is the table factor_table[f] over the variables variables[factor_begin[f]] to variables[factor_begin[f + 1] - 1],
 * which are distinct. The store must outlive the network. Returns NULL if memory runs out. */
HIDET_DIST_API hidet_dist_network *hidet_dist_network_create(hidet_dist_tables *tables, int64_t count,
                                                             const int64_t *sizes, int64_t factors,
                                                             const int64_t *factor_table, const int64_t *factor_begin,
                                                             const int64_t *variables);
HIDET_DIST_API void hidet_dist_network_destroy(hidet_dist_network *network);

/* Chooses an order of eliminating all variables v but those with kept[v], greedily: the variable of least work next, or
 * with `by_table` that which leaves the smallest table. The work of a step is the number of its additions. Writes the
 * order and its length, and to `work` the sum of the works of all steps, where equal ones count once, and the largest.
 * Both are infinite, and the order is incomplete, if a step has more than `work_limit`. */
HIDET_DIST_API int32_t hidet_dist_network_order(const hidet_dist_network *network, const uint8_t *kept,
                                                int32_t by_table, double work_limit, hidet_dist_elimination_stop stop,
                                                int64_t *order, int64_t *length, double *work);

/* Eliminates variables, once. The sum of the offsets so far is the network's constant. */
HIDET_DIST_API int32_t hidet_dist_network_eliminate(hidet_dist_network *network, int64_t length, const int64_t *order,
                                                    hidet_dist_elimination_stop stop);
HIDET_DIST_API double hidet_dist_network_constant(const hidet_dist_network *network);

/* Writes a value of each variable, the first of equally good ones, whose sum is the constant, after all were
 * eliminated. */
HIDET_DIST_API int32_t hidet_dist_network_values(const hidet_dist_network *network, int64_t *values);

/* Writes the least sum, less the constant, for all values of `count` variables in row-major order; these are the ones
 * that were not eliminated. */
HIDET_DIST_API int32_t hidet_dist_network_least_over(const hidet_dist_network *network, int64_t count,
                                                     const int64_t *kept, double *result);

/* Writes the least sum for each value of each of the first `count` variables, one after the other, after all variables
 * were eliminated. Too wide if a step has more than `work_limit` additions. */
HIDET_DIST_API int32_t hidet_dist_network_marginals(hidet_dist_network *network, int64_t count, double work_limit,
                                                    hidet_dist_elimination_stop stop, double *result);

#ifdef __cplusplus
}
#endif

#endif
