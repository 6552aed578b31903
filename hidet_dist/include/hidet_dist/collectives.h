/*
 * The collectives that compiled kernels call, and the communicators that carry them out.
 *
 * A kernel calls hidet_dist_all_reduce, hidet_dist_all_gather, hidet_dist_reduce_scatter, hidet_dist_all_to_all,
 * hidet_dist_gather_rows, hidet_dist_reduce_scatter_rows, hidet_dist_broadcast, hidet_dist_send, hidet_dist_recv or
 * hidet_dist_send_recv. They act on the calling thread's
 * current communicator, which the process sets with hidet_dist_bind before it launches the kernel. How the data travels
 * is up to the communicator's transport, a table of functions: this library does not depend on any communication
 * library.
 *
 * The ranks of a job form a mesh, and a rank is the row-major index of its coordinate in it. A collective identifies
 * its group by a bit mask of mesh axes, bit i for axis i: the group of a rank is all ranks whose coordinates differ
 * from the rank's in these axes only, ordered row-major. Mask 0 is the group of the rank alone. A group rank is a
 * rank's number in this order, from 0; in the group of all axes, it equals the rank in the mesh.
 *
 * All ranks of a group take part in each of its collectives, in the same order. In a send or receive only two ranks do.
 * Messages from one rank to another arrive in the order of sending, even if they were sent in different groups.
 *
 * Errors. A collective that fails returns a code other than HIDET_DIST_OK and records its message on the communicator,
 * which has failed from then on: each later collective returns HIDET_DIST_FAILED at once without calling the transport,
 * so that a whole graph launched natively runs to its end instead of hanging. The first message is kept.
 */
#ifndef HIDET_DIST_COLLECTIVES_H
#define HIDET_DIST_COLLECTIVES_H

#include <stdint.h>

#include "hidet_dist/visibility.h"

/* Raised whenever the declarations below change in a way that breaks kernels compiled before. */
#define HIDET_DIST_ABI_VERSION 7

/* The most axes that a mesh may have. */
#define HIDET_DIST_MAX_MESH_AXES 16

/* The code for no rank. */
#define HIDET_DIST_NOBODY (-1)

#ifdef __cplusplus
extern "C" {
#endif

enum hidet_dist_status {
  HIDET_DIST_OK = 0,
  HIDET_DIST_NO_COMMUNICATOR = 1,   /* the calling thread has no current communicator */
  HIDET_DIST_INVALID_ARGUMENT = 2,  /* a negative count, an unknown dtype, a null buffer, ... */
  HIDET_DIST_FAILED = 3             /* the transport failed, now or before */
};

/* Half types are IEEE binary16 and bfloat16; a bool is one byte, 0 or 1. */
enum hidet_dist_dtype {
  HIDET_DIST_F32 = 0,
  HIDET_DIST_F64 = 1,
  HIDET_DIST_F16 = 2,
  HIDET_DIST_BF16 = 3,
  HIDET_DIST_I8 = 4,
  HIDET_DIST_I32 = 5,
  HIDET_DIST_I64 = 6,
  HIDET_DIST_U8 = 7,
  HIDET_DIST_BOOL = 8
};

/*
 * Sums and products of integers wrap around. On bools, sum and max are "or", and min and product are "and".
 *
 * A mean is the sum divided by the number of ranks. That of integers is the sum that an all-reduce gives, wrapped
 * around if need be, divided and rounded towards zero, on every transport; that of floating-point numbers may differ
 * between transports in the last bits, as sums do. Bools have no mean.
 */
enum hidet_dist_reduce_op {
  HIDET_DIST_SUM = 0,
  HIDET_DIST_MAX = 1,
  HIDET_DIST_MIN = 2,
  HIDET_DIST_PRODUCT = 3,
  HIDET_DIST_MEAN = 4
};

typedef struct hidet_dist_communicator hidet_dist_communicator;

enum hidet_dist_collective {
  HIDET_DIST_ALL_REDUCE = 0,
  HIDET_DIST_ALL_GATHER = 1,
  HIDET_DIST_REDUCE_SCATTER = 2,
  HIDET_DIST_ALL_TO_ALL = 3,
  HIDET_DIST_BROADCAST = 4,
  HIDET_DIST_GATHER_ROWS = 5,
  HIDET_DIST_REDUCE_SCATTER_ROWS = 6,
  HIDET_DIST_MESSAGE = 7  /* a send, a receive or both */
};

/*
 * A rank's description of its collective. The other ranks accept its data only if their description is the same. So
 * ranks that are out of step, or were built from different programs, are detected before any of them reads data of a
 * different collective. It has no padding, so that its bytes can be sent and compared.
 */
typedef struct hidet_dist_envelope {
  int64_t call;       /* of the program; see hidet_dist_communicator_begin_call */
  int64_t count;      /* elements: those given to the collective, of a message, or of all rows that are sent */
  int32_t root;       /* group rank of a broadcast's root, or a checksum of the mask of wanted rows; else 0 */
  uint8_t kind;       /* hidet_dist_collective */
  uint8_t dtype;      /* hidet_dist_dtype */
  uint8_t reduce_op;  /* hidet_dist_reduce_op, HIDET_DIST_SUM where nothing is reduced */
  uint8_t reserved;   /* 0 */
} hidet_dist_envelope;

/*
 * The blocks of a group's ranks, side by side in a tensor: it has `rows` rows of `whole` elements, and the block of
 * group rank p has `row` elements of each row, from p * row on. The shards of a tensor that is split along a dim have
 * this form, with the dims before that one as rows. Received blocks may extend beyond the end of the rows; the excess
 * is dropped. Sent blocks must not.
 */
typedef struct hidet_dist_blocks {
  int64_t rows, row, whole;
} hidet_dist_blocks;

/*
 * The implementation of collectives and messages. Each function gets checked arguments, with a group of two ranks or
 * more and a positive count. It returns 0, or another number after it has recorded the reason by hidet_dist_fail. The
 * context is passed on unchanged.
 *
 * Where this costs little, a transport also sends each rank's envelope, and calls hidet_dist_check_envelope on received
 * ones before it delivers any data.
 *
 * send_recv gets ranks of the mesh other than the calling rank. An unused direction has the rank HIDET_DIST_NOBODY and
 * the count 0; at least one direction is used. Neither direction may wait for the other.
 */
typedef struct hidet_dist_transport {
  void *context;
  int32_t (*all_reduce)(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t reduce_op,
                        int32_t group);
  int32_t (*all_gather)(void *context, const void *send, void *recv, int64_t send_count, int32_t dtype, int32_t group);
  int32_t (*reduce_scatter)(void *context, const void *send, void *recv, int64_t recv_count, int32_t dtype,
                            int32_t reduce_op, int32_t group);
  int32_t (*all_to_all)(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t group);
  int32_t (*broadcast)(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t root,
                       int32_t group);
  int32_t (*send_recv)(void *context, const void *send, int64_t send_count, int32_t to_rank, void *recv,
                       int64_t recv_count, int32_t from_rank, int32_t dtype);
  int32_t (*all_gather_parts)(void *context, const void *send, void *recv, const int64_t *joined, int64_t unit,
                              int32_t dtype, int32_t group);
  int32_t (*reduce_scatter_parts)(void *context, const void *send, void *recv, const int64_t *split, int64_t unit,
                                  int32_t dtype, int32_t reduce_op, int32_t group);
  /* An exchange of parts of any size, one after the other in group order. `counts` is the same on all ranks: group rank
   * p sends counts[p * group size + q] * unit elements to group rank q. One of them at least is positive. */
  int32_t (*all_to_all_v)(void *context, const void *send, void *recv, const int64_t *counts, int64_t unit,
                          int32_t dtype, int32_t group);
  /* Copies within the rank, for groups of one rank. May be null where the buffers are in host memory. */
  int32_t (*copy)(void *context, const void *send, void *recv, int64_t bytes);
  /* Copies to host memory, and returns when that is done. Null where the buffers are there. */
  int32_t (*read)(void *context, const void *source, void *target, int64_t bytes);
  /* Collectives on blocks that lie side by side, in host memory. May be null: the blocks are then copied to contiguous
   * memory and back. */
  int32_t (*all_gather_blocks)(void *context, const void *send, void *recv, const hidet_dist_blocks *received,
                               int32_t dtype, int32_t group);
  int32_t (*reduce_scatter_blocks)(void *context, const void *send, void *recv, const hidet_dist_blocks *sent,
                                   int32_t dtype, int32_t reduce_op, int32_t group);
  int32_t (*all_to_all_blocks)(void *context, const void *send, const hidet_dist_blocks *sent, void *recv,
                               const hidet_dist_blocks *received, int32_t dtype, int32_t group);
  /* Exchanges of wanted rows, in host memory; a rank wants one of another rank at least. May be null: the rows are then
   * packed for all_to_all_v. */
  int32_t (*gather_rows)(void *context, const void *send, const uint8_t *wanted, void *recv, int64_t rows, int64_t row,
                         int32_t dtype, int32_t group);
  int32_t (*reduce_scatter_rows)(void *context, const void *send, const uint8_t *wanted, void *recv, int64_t rows,
                                 int64_t row, int32_t dtype, int32_t group);
} hidet_dist_transport;

/* ---- Called by compiled kernels. Counts are in elements. ---- */

/* Reduces `count` elements over the group; every rank gets the result. `send` and `recv` may be the same buffer. */
HIDET_DIST_API int32_t hidet_dist_all_reduce(const void *send, void *recv, int64_t count, int32_t dtype,
                                             int32_t reduce_op, int32_t group);

/* Concatenates each rank's `send_count` elements in group order: `recv` holds group size * send_count elements and
 * does not overlap `send`. */
HIDET_DIST_API int32_t hidet_dist_all_gather(const void *send, void *recv, int64_t send_count, int32_t dtype,
                                             int32_t group);

/* Reduces group size * recv_count elements over the group; the i-th rank of it gets the i-th run of `recv_count`
 * elements of the result. The buffers do not overlap. */
HIDET_DIST_API int32_t hidet_dist_reduce_scatter(const void *send, void *recv, int64_t recv_count, int32_t dtype,
                                                 int32_t reduce_op, int32_t group);

/* Sends the i-th run of `count` elements to the i-th rank of the group, and receives the i-th run of `recv` from it.
 * Both buffers hold group size * count elements and do not overlap. */
HIDET_DIST_API int32_t hidet_dist_all_to_all(const void *send, void *recv, int64_t count, int32_t dtype, int32_t group);

/* The same for blocks that lie side by side in the sent or received tensor. In host memory only. In an all-to-all, one
 * of `sent` and `received` may be null, for contiguous blocks one after the other. */
HIDET_DIST_API int32_t hidet_dist_all_gather_blocks(const void *send, void *recv, const hidet_dist_blocks *received,
                                                    int32_t dtype, int32_t group);
HIDET_DIST_API int32_t hidet_dist_reduce_scatter_blocks(const void *send, void *recv, const hidet_dist_blocks *sent,
                                                        int32_t dtype, int32_t reduce_op, int32_t group);
HIDET_DIST_API int32_t hidet_dist_all_to_all_blocks(const void *send, const hidet_dist_blocks *sent, void *recv,
                                                    const hidet_dist_blocks *received, int32_t dtype, int32_t group);

/*
 * The same for parts of unequal size, one after the other in group order. `joined` and `split` have a size for each rank
 * of the group, the same ones on all ranks, and `unit` is the number of elements in one of it. Group rank p holds
 * joined[p] * unit elements before an all-gather, and split[p] * unit after a reduce-scatter. In an all-to-all, it
 * sends joined[p] * split[q] * unit elements to group rank q.
 */
HIDET_DIST_API int32_t hidet_dist_all_gather_parts(const void *send, void *recv, const int64_t *joined, int64_t unit,
                                                   int32_t dtype, int32_t group);
HIDET_DIST_API int32_t hidet_dist_reduce_scatter_parts(const void *send, void *recv, const int64_t *split, int64_t unit,
                                                       int32_t dtype, int32_t reduce_op, int32_t group);
HIDET_DIST_API int32_t hidet_dist_all_to_all_parts(const void *send, void *recv, const int64_t *split,
                                                   const int64_t *joined, int64_t unit, int32_t dtype, int32_t group);

/*
 * Exchanges of the rows that ranks want. In host memory only. Each of the p ranks has `rows` rows of `row` elements, and
 * row i of all p * rows is row i % rows of group rank i / rows. Group rank d wants it where wanted[d * p * rows + i] is
 * not 0; all ranks must have the same mask. The buffers do not overlap.
 *
 * hidet_dist_gather_rows writes the rows that the rank wants to their places among all p * rows of `recv`, and zeros to
 * the others. It is an all-gather that sends wanted rows only.
 *
 * hidet_dist_reduce_scatter_rows writes to each of the rank's rows the sum over the ranks that want it, in group order,
 * of what these have in its place among all p * rows of `send`. Nothing else of `send` is read. It is a reduce-scatter of
 * sums that sends wanted rows only.
 */
HIDET_DIST_API int32_t hidet_dist_gather_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows,
                                              int64_t row, int32_t dtype, int32_t group);
HIDET_DIST_API int32_t hidet_dist_reduce_scatter_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows,
                                                      int64_t row, int32_t dtype, int32_t group);

/*
 * The exchange alone, of packed rows: in device memory, kernels pack the rows before it, and unpack them or add them up
 * behind it. `send` has the rows that the rank sends to other ranks, and `recv` gets those that it receives from them,
 * both one after the other in group order, those of one rank in ascending order. A call waits until the mask is computed,
 * which tells the host how many rows there are, so it cannot be captured into a graph.
 *
 * hidet_dist_gather_packed_rows sends to each rank what it wants of this rank's rows. hidet_dist_reduce_scatter_packed_rows
 * sends to each rank those of its rows that this rank wants.
 */
HIDET_DIST_API int32_t hidet_dist_gather_packed_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows,
                                                     int64_t row, int32_t dtype, int32_t group);
HIDET_DIST_API int32_t hidet_dist_reduce_scatter_packed_rows(const void *send, const uint8_t *wanted, void *recv,
                                                             int64_t rows, int64_t row, int32_t dtype, int32_t group);

/* Sends the `count` elements at `send` of group rank `root` to every rank of the group; the others' `send` is not read
 * and may be null. `send` and `recv` may be the same buffer. */
HIDET_DIST_API int32_t hidet_dist_broadcast(const void *send, void *recv, int64_t count, int32_t dtype, int32_t root,
                                            int32_t group);

/* Sends `count` elements to group rank `to`, which must receive as many. It depends on the transport whether this waits
 * until they are received: two ranks that both send to each other first may deadlock. */
HIDET_DIST_API int32_t hidet_dist_send(const void *send, int64_t count, int32_t dtype, int32_t to, int32_t group);

/* Receives `count` elements from group rank `from`. */
HIDET_DIST_API int32_t hidet_dist_recv(void *recv, int64_t count, int32_t dtype, int32_t from, int32_t group);

/* Sends and receives at the same time, so that ranks of a ring do not deadlock. The other ends may be plain sends and
 * receives. `to` or `from` may be HIDET_DIST_NOBODY, at the ends of a chain. A rank may send to itself only if it
 * receives as much from itself. The buffers do not overlap. */
HIDET_DIST_API int32_t hidet_dist_send_recv(const void *send, int64_t send_count, int32_t to, void *recv,
                                            int64_t recv_count, int32_t from, int32_t dtype, int32_t group);

/* The group rank of the calling thread's rank, and the number of ranks in its group; -1 without a current communicator,
 * or for a mask with an axis that the mesh does not have. */
HIDET_DIST_API int32_t hidet_dist_group_rank(int32_t group);
HIDET_DIST_API int32_t hidet_dist_group_size(int32_t group);

/* ---- Called by the process that launches them. ---- */

HIDET_DIST_API int32_t hidet_dist_abi_version(void);

/* The bytes of one element, or 0 for an unknown dtype. */
HIDET_DIST_API int64_t hidet_dist_dtype_size(int32_t dtype);

/*
 * A communicator for one rank of a mesh, or null (see hidet_dist_last_error). The transport's table is copied; its
 * functions and context must outlive the communicator. A null transport is the built-in one for a mesh of one device,
 * which copies host memory.
 */
HIDET_DIST_API hidet_dist_communicator *hidet_dist_communicator_create(const hidet_dist_transport *transport,
                                                                       const int64_t *mesh_shape, int32_t mesh_axes,
                                                                       int64_t rank);

/* Frees a communicator. No thread may be in one of its collectives; a thread bound to it must be bound to another. */
HIDET_DIST_API void hidet_dist_communicator_destroy(hidet_dist_communicator *communicator);

/* Makes a communicator the calling thread's current one; null leaves the thread without one. */
HIDET_DIST_API void hidet_dist_bind(hidet_dist_communicator *communicator);

/* The message of a communicator's first failure, valid as long as the communicator, or null. */
HIDET_DIST_API const char *hidet_dist_communicator_error(const hidet_dist_communicator *communicator);

/* Makes a communicator fail with this message, unless it has failed before. From any thread. */
HIDET_DIST_API void hidet_dist_fail(hidet_dist_communicator *communicator, const char *message);

/*
 * Begins a call of the program. The number must be the same on all ranks. Further collectives belong to the call; those
 * before the first call belong to call 0. Must not be called during a collective.
 */
HIDET_DIST_API void hidet_dist_communicator_begin_call(hidet_dist_communicator *communicator, int64_t call);

/* Writes the envelope of the calling thread's current collective; of a message, that of the sent data. 0 on success. */
HIDET_DIST_API int32_t hidet_dist_current_envelope(hidet_dist_envelope *envelope);

/*
 * Compares the envelope of rank `from` of the mesh with that of the calling thread's collective; for a message, with
 * that of the received data. Returns 0 if they are equal; otherwise the communicator fails, because the two are out of
 * step.
 */
HIDET_DIST_API int32_t hidet_dist_check_envelope(const hidet_dist_envelope *theirs, int64_t from);

/* The rank whose different collective made the communicator fail, or HIDET_DIST_NOBODY. From any thread. */
HIDET_DIST_API int64_t hidet_dist_communicator_out_of_step(const hidet_dist_communicator *communicator);

/* The number of collectives, sends and receives started on the communicator. From any thread. */
HIDET_DIST_API int64_t hidet_dist_communicator_sequence(const hidet_dist_communicator *communicator);

/*
 * The other ranks of the mesh in the communicator's current or failed collective: returns their number, and writes up
 * to `capacity` of them to `ranks`. 0 without such a collective. From any thread.
 */
HIDET_DIST_API int64_t hidet_dist_communicator_peers(const hidet_dist_communicator *communicator, int64_t *ranks,
                                                     int64_t capacity);

/* The number of ranks in the group along these mesh axes, or -1 for a mask with an axis that the mesh does not have. */
HIDET_DIST_API int64_t hidet_dist_communicator_group_size(const hidet_dist_communicator *communicator, int32_t group);

/* The message of the calling thread's last failed call of this library, or an empty string. */
HIDET_DIST_API const char *hidet_dist_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
