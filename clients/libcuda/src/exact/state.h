/* SPDX-License-Identifier: MIT */
/* What the files of mode `exact` share. */
#pragma once

#include <pthread.h>

#include "exact/exact.h"
#include "exact/order.h"
#include "failover/carry.h"
#include "span.h"

#define MPSD_EXACT_PAGE ((uint64_t)2 << 20)

/* Of everything below. Not held in calls of the driver, but in a move, when nobody else calls it. */
extern struct mpsd_word mpsd_exact_lock;

/* For the mover, in the fence: whoever has the lock may wait for one that the mover has. False: somebody keeps it. */
bool mpsd_exact_lock_soon(void);

/* operations (issue.c) */

enum mpsd_op_kind {
	MPSD_OP_LAUNCH,
	MPSD_OP_COPY,
	MPSD_OP_SET,
	MPSD_OP_RECORD,
	MPSD_OP_WAIT,
	MPSD_OP_GRAPH,
	MPSD_OP_HOST,
	MPSD_OP_MEMORY,
	MPSD_OP_CALL,		/* in graphs alone: a function of the host, by each launch */
};

enum mpsd_op_copy {
	MPSD_COPY_ANY,
	MPSD_COPY_IN,		/* from the host */
	MPSD_COPY_OUT,		/* to the host */
	MPSD_COPY_WITHIN,
};

struct mpsd_allocation;
struct mpsd_plan;
struct mpsd_reader;
struct mpsd_memops;
struct mpsd_shelf;

struct mpsd_op {
	struct mpsd_op *next;
	atomic_uint shares;	/* others that will free it too */
	enum mpsd_op_kind kind;
	bool waits;			/* the call is one without a stream */
	bool is_brief;			/* it lasts no longer than its epoch, as a launch that is not captured */
	bool is_marked;			/* when what is before it in its lane is proven, all is that it came after */
	atomic_uchar state;		/* enum mpsd_op_state (submit.h) */
	bool is_again;			/* a move has begun to do it again */
	bool is_skipped;		/* refused, and not the epoch's any more */
	bool is_relayed;		/* left to the relay (relay.h), */
	bool is_counted;		/* and with the lock: counted as given, for its copy was left meanwhile (work.c) */
	CUstream stream;		/* what the program calls it */
	struct mpsd_lane *lane;
	uint64_t number;		/* in its lane */
	struct mpsd_shelf *shelf;	/* that it lies on; NULL: it was allocated by itself */
	union {
		struct {
			CUfunction function;
			CUlaunchConfig config;
			CUlaunchAttribute *attributes;
			bool is_plain, is_cooperative, is_buffer;
			unsigned int count;
			size_t bytes;
			void **parameters;
			char *buffer;
			struct mpsd_reader *reader;	/* what is known of its words; NULL: nothing (readers.h) */
		} launch;
		struct {
			enum mpsd_op_copy way;
			CUdeviceptr to, from;
			size_t size;
			void *kept;		/* what was there when it was given */
			bool is_borrowed;	/* the program's own, until it may know that it was read */
			bool is_from_host, is_for_host;	/* what it reads, and writes */
			bool is_by_kernel;	/* of this library's (copier.h) */
			bool is_staged;		/* the thread that waits for it begins anew after a move */
			const struct mpsd_rows *rows;	/* with the operation; NULL: it is one run of bytes */
			CUcontext peer;		/* both are in it; NULL: the call named none */
		} copy;
		struct {
			CUdeviceptr to;
			uint32_t value;
			size_t width, count;
			size_t pitch, rows;	/* of one that is not one run of elements */
			bool has_rows;
			bool is_outside;	/* of the window: the host's memory, as far as is known */
		} set;
		struct {
			CUevent event;
			bool is_elsewhere;	/* of a capture: recorded since, beside it, or no more */
			unsigned int flags;
			bool is_flagged;
		} event;
		struct {
			CUgraphExec exec;
			struct mpsd_graph *graph;	/* a reference to it */
		} graph;
		struct mpsd_host *host;
		struct mpsd_memops *memory;
		struct {
			CUhostFn function;
			void *data;
		} call;
	};
};

void mpsd_op_free(struct mpsd_op *op);
void mpsd_op_forget(struct mpsd_op *op);	/* the same with the lock */
void mpsd_op_share(struct mpsd_op *op);

/*
 * rows.c: copies of two and three dimensions, and memsets of two. Of such a copy `to` and `from` are where its first
 * bytes are, and `size` is that of all rows.
 */
struct mpsd_rows {
	CUDA_MEMCPY3D given;	/* as the program gave it; of two dimensions it is one plane */
	bool is_3d, is_unaligned;
	size_t to_pitch, to_plane, from_pitch, from_plane;
	size_t to_span, from_span;	/* from the first byte to the last */
};

/* memops.c: words in memory that are written or waited for, saved before; in that stream of the copy of this call. */
CUresult mpsd_memops_save(const struct mpsd_memops *ops, struct mpsd_plan *plan);
bool mpsd_memops_wait(const struct mpsd_memops *ops);	/* whether there is one that waits */
CUresult mpsd_memops_issue(const struct mpsd_memops *ops, CUstream stream);

/* What a node of a graph is that does them. NULL: they are not understood, or there is no memory. */
struct mpsd_op *mpsd_memops_of_node(const CUDA_BATCH_MEM_OP_NODE_PARAMS *given);

/* The same by the names of the copy of this call; what paramArray leads to is the caller's to free. NULL there: no memory. */
CUDA_BATCH_MEM_OP_NODE_PARAMS mpsd_memops_native(const struct mpsd_memops *ops, CUcontext context);

/* Out of the host's memory, or into it: a copy engine may go on with it when kernels have ended. */
bool mpsd_copy_is_with_host(const struct mpsd_op *op);

/* With the lock: whether the end of kernels is the end of all that is in flight, or soon after it. */
bool mpsd_epoch_ends_with_kernels(void);

/* Save where they are written; what lies between rows that are far apart is not saved. */
CUresult mpsd_rows_save(const struct mpsd_op *op, struct mpsd_plan *plan);

/*
 * What nodes of a graph do, which belong to no stream. NULL: it is not understood (arrays, nothing to be copied), or there
 * is no memory.
 */
struct mpsd_op *mpsd_rows_of_node(const CUDA_MEMCPY3D *given);
struct mpsd_op *mpsd_set_of_node(const CUDA_MEMSET_NODE_PARAMS *given);

/* A copy with the addresses of the copy of this call. */
CUDA_MEMCPY3D mpsd_rows_native(const struct mpsd_op *op);

/* As the program called it; or in that stream of the copy of this call. */
CUresult mpsd_rows_issue_now(const struct mpsd_op *op);
CUresult mpsd_rows_issue(const struct mpsd_op *op, CUstream stream);

/* What a copy reads from the host is kept, packed, where it is small, or pageable and not large. False: no memory. */
#define MPSD_MOST_KEPT ((size_t)1 << 20)	/* of pageable memory; more is waited for */
bool mpsd_copy_keep(struct mpsd_op *op);

/* calls.c: whether the address is the GPU's, as far as the program's memory lies in a window. */
bool mpsd_is_device(CUdeviceptr address);

/* calls.c: of what is named the host's and is the GPU's, waited for. */
CUresult mpsd_copy_within(CUdeviceptr to, CUdeviceptr from, size_t size);

/* calls.c: a copy of it (and of its rows), put into the order and given to the driver; `proves`: it has ended when this returns. */
CUresult mpsd_submit_new(const struct mpsd_op *given, bool proves);

/* staging.c: as mpsd_stage_out(), of rows. */
CUresult mpsd_stage_rows_out(const struct mpsd_op *op);

/* With the locks as they are in a forked child. */
void mpsd_stage_child(void);

/* leads.c: of an operation that is a launch. */
bool mpsd_launch_records_event(const struct mpsd_op *op);

static inline bool mpsd_config_records_event(const CUlaunchConfig *config)
{
	for (unsigned int i = 0; __builtin_expect(config->attrs && i < config->numAttrs, 0); i++)
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT ||
		    config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
			return true;
	return false;
}

/* A node of a graph: an event that is recorded, or waited for, by each launch; not an edge that a capture makes. */
static inline bool mpsd_op_is_event_node(const struct mpsd_op *op)
{
	return (op->kind == MPSD_OP_RECORD && op->event.flags & CU_EVENT_RECORD_EXTERNAL) ||
	       (op->kind == MPSD_OP_WAIT && op->event.flags & CU_EVENT_WAIT_EXTERNAL);
}

/* As the program called it, in the copy of this call. */
CUresult mpsd_op_issue(const struct mpsd_op *op);
CUresult mpsd_op_launch(const struct mpsd_op *op);	/* the same of one that is a launch */

/* The same with other streams and events, by the names of the copy of this call. */
CUresult mpsd_op_issue_on(const struct mpsd_op *op, CUstream stream, CUevent event);

/*
 * The same of a graph that was launched, part by part, whatever its executable graph is by now. capture_parts(): into a
 * capture that is made again.
 */
CUresult mpsd_op_issue_parts(const struct mpsd_op *op, CUstream stream);
CUresult mpsd_op_capture_parts(const struct mpsd_op *op, CUstream stream);

/*
 * In the legacy stream, whatever stream it was for: one after the other, in the order in which they were submitted,
 * is right whatever made the program sure of an order then, an event or a wait of its own.
 */
CUresult mpsd_op_again(const struct mpsd_op *op);

/* lanes.c */

struct mpsd_lane {
	CUstream stream;
	bool is_used, is_apart;	/* the legacy stream does not wait for it */
	uint64_t given;		/* operations so far */
	uint64_t marked;	/* after so many of them the GPU writes */
	uint64_t proven;	/* and has written */
	uint64_t after_saves;	/* how many saves, of any lane, what comes next is known to come after */
	uint64_t after_replay;	/* in the copy after so many moves it waits for what was done again there */
	uint64_t stop;		/* this one is not proven, whatever is written: a function that did not run; 0: none */
	uint64_t saved;		/* the last one of them that is a save; 0: none that matters */
	uint64_t asked_ns;	/* when the driver was asked last, in place of its word */
} __attribute__((aligned(64)));

extern struct mpsd_lane mpsd_lanes[MPSD_LANES];
extern unsigned int mpsd_lanes_used;	/* with the lock: the first ones of them ever were in use */

/* Without the lock. AGAIN, or a loss: there is no memory for the words yet. */
CUresult mpsd_lanes_ready(void);

/* With the lock. NULL: there are no more. */
struct mpsd_lane *mpsd_lane_of(CUstream stream);
struct mpsd_lane *mpsd_lane_find(CUstream stream);

/* With the lock: what the GPU has written by now. */
uint64_t mpsd_lane_look(struct mpsd_lane *lane);
void mpsd_lane_conclude(struct mpsd_lane *lane, uint64_t number);	/* so many have ended, by the order of streams */

/* With the lock: whether what comes into it is ordered with what comes into another, by the legacy stream. */
bool mpsd_lane_is_ordered(const struct mpsd_lane *lane);
bool mpsd_lanes_all_proven(void);
bool mpsd_lanes_others_are_open(const struct mpsd_lane *lane);	/* work of the program's in other streams is not proven */
bool mpsd_lanes_all_marked(void);	/* what is not proven will be */

/* lanemarks.c: without the lock, by who has the order: the GPU writes after what was given so far. */
CUresult mpsd_lane_mark(struct mpsd_lane *lane);
CUresult mpsd_lanes_mark(void);	/* waits.c */

/*
 * The same by a kernel that is about to be given to it, and writes its number there itself. NULL: this call's copy was left.
 * unmark(): it was refused; the number stays taken, and the next mark proves it, too.
 */
uint32_t *mpsd_lane_mark_ahead(struct mpsd_lane *lane, uint64_t *number, uint64_t *before);
void mpsd_lane_unmark(struct mpsd_lane *lane, uint64_t before);

/* lanes.c: the word in the copy of this call. */
uint32_t *mpsd_lane_word(const struct mpsd_lane *lane);

/* Without the lock: until the GPU has written that. What was not marked, for it is captured, is not waited for. */
CUresult mpsd_lane_wait(struct mpsd_lane *lane, uint64_t number);

/* The same where others may wait for this thread. NOT_READY: a function of the host that may wait for them keeps it. */
CUresult mpsd_lane_come(struct mpsd_lane *lane, uint64_t number);

/* Without the lock. NOT_READY: it has not, and the driver need not be asked. */
CUresult mpsd_lane_seen(struct mpsd_lane *lane, uint64_t number);

/* All that was given, by who has the order, as mpsd_lane_come(). */
CUresult mpsd_lanes_wait(void);

/* With the lock: that operation is not proven in the copy after so many moves. */
void mpsd_lane_stop(struct mpsd_lane *lane, uint64_t number, uint64_t moves);

/* In a move, with the lock: other words. What is proven stays so. */
void mpsd_lanes_move(void);

/* lanemarks.c: in a move, with the lock, but not in the call: the GPU writes that number, in the legacy stream. */
CUresult mpsd_lane_mark_now(struct mpsd_lane *lane, uint64_t number);

/* In a move: a word of the host's that the GPU may wait for in the copy that comes into use; NULL: there is none. */
uint32_t *mpsd_lanes_gate(void);

/* With the lock: nothing is waited for any more. Not `all`: but for what the mover itself has begun. */
void mpsd_lanes_give_up(bool all);

/* points.c, with the lock: where an event is. A record that is proven, or none, is (NULL, 0). */
struct mpsd_point {
	struct mpsd_lane *lane;
	uint64_t number;
};

void mpsd_point_set(CUevent event, struct mpsd_point point);
void mpsd_point_use(CUevent event);		/* by an operation of this epoch */
void mpsd_point_set_by_graph(CUevent event);	/* by a launch in this epoch, at some time in it: nothing of this library's tells when */
bool mpsd_point_is_by_graph(CUevent event);
struct mpsd_point mpsd_point_of(CUevent event);
bool mpsd_point_is_used(CUevent event);
void mpsd_point_forget(CUevent event);
void mpsd_points_forget_lane(const struct mpsd_lane *lane);

/* epoch.c */

extern struct mpsd_epoch {
	uint64_t number;	/* from 1 */
	struct mpsd_op *first, **last;
	uint64_t operations, kept_bytes;
	uint64_t long_from;	/* so many operations are worth a look at all lanes */
	bool has_borrowed;
	bool is_waiting;	/* some of it waits for a word that anybody may write, this program too */
	bool is_awaited;	/* an operation is about to come into it */
	bool is_closed;		/* none does: its copy is about to be left, where it can still be written */
	bool is_given_up;	/* it has what is put back alone, and ends before anything comes into it */
	const char *unsure;
} mpsd_epoch;

void mpsd_epoch_unsure(const char *why);	/* takes the lock */
void mpsd_epoch_unsure_for_now(const char *why);	/* the same, and the daemon does not hear of it */

static inline bool mpsd_epoch_is_unsure(void)
{
	return __atomic_load_n(&mpsd_epoch.unsure, __ATOMIC_RELAXED) != NULL;
}

/* With the lock */
void mpsd_epoch_strike(struct mpsd_op *op);	/* mostly the last one */
void mpsd_epoch_end(void);
void mpsd_epoch_forget(void);		/* its operations; what was saved may still be wanted */

/* Takes the lock: the program is about to know what is proven. AGAIN: a move has come between, so it must not yet. */
CUresult mpsd_epoch_observed(void);

/* Takes the lock: whether something waits for a word in memory, which may be what this thread, or another one, writes next. */
bool mpsd_epoch_is_waiting(void);

/*
 * The same around a wait for some of it, where the epoch has become long: it ends if all has, and not only what is
 * waited for. Without the lock; hasten() with the order. Nobody waits for more than some microseconds, and once for
 * so many operations.
 */
bool mpsd_epoch_is_long(void);
void mpsd_epoch_hasten(void);
void mpsd_epoch_hastened(void);		/* not again before there are as many operations more */
CUresult mpsd_epoch_finish(void);

/*
 * With the lock: this callback is about to run. The epoch ends if everything else has ended and its copies were little of it;
 * the next epoch begins with the callback. Programs that wait only by callbacks end their epochs nowhere else.
 */
void mpsd_epoch_end_before(struct mpsd_host *host, struct mpsd_point at);

/* The same with the lock, while something is open. `at`: the GPU has come to that operation; NULL: it may have come far. */
void mpsd_epoch_seen(struct mpsd_point at);

/* In a move, with the lock: what is known of the copy that was left. */
void mpsd_epoch_left(void);

/* Without the lock and the order: what it writes to the host's memory was read there, and is kept. */
CUresult mpsd_epoch_come_after_reads(const struct mpsd_op *op);

/* Without the lock, with the order. */
CUresult mpsd_epoch_settle(void);
CUresult mpsd_epoch_make_room(void);	/* and what was freed during a capture goes: nothing is planned */

/* replay.c: without the lock, with the order: what comes next into the lane comes after what was done again. */
CUresult mpsd_replay_come_after(struct mpsd_lane *lane);
extern atomic_uint_least64_t mpsd_replay_moves;	/* of the copy in which work was done again last */

/* Whether nothing is left to be done for that. A thread that a move overtakes may look at it with no lock. */
static inline bool mpsd_replay_is_behind(const struct mpsd_lane *lane)
{
	uint64_t moves = mpsd_tables()->moves;

	return !moves || atomic_load(&mpsd_replay_moves) != moves ||
	       __atomic_load_n(&lane->after_replay, __ATOMIC_RELAXED) == moves;
}

void mpsd_replay_finish(void);

/* hostcalls.c: a function of the host in a graph. NULL: no memory. */
struct mpsd_op *mpsd_call_of_node(CUhostFn function, void *data);

/* hostnode.c: what the copy of this call is given for it, false: no memory; and what the program gave. */
bool mpsd_hostnode_native(const struct mpsd_op *op, CUDA_HOST_NODE_PARAMS *native);
void mpsd_hostnode_name(CUDA_HOST_NODE_PARAMS *params);
void mpsd_hostnode_child(void);

/* hostfunc.c: functions of the host in streams */

struct mpsd_host;

/* With the lock: its operation is noted. */
void mpsd_host_noted(const struct mpsd_op *op);

/* Given to the driver, in the copy of this call. */
CUresult mpsd_host_issue(struct mpsd_host *host, CUstream stream);

/* In a move: whether it has run to its end. */
bool mpsd_host_has_run(struct mpsd_host *host);

void mpsd_host_hold(struct mpsd_host *host);
void mpsd_host_let_go(struct mpsd_host *host);
bool mpsd_hosts_are_open(void);		/* some have not run to their end */
bool mpsd_hosts_keep(void);		/* one runs, and has for long */

/* submit.c */

/* `op` is the callee's. `proves`: it has ended when this returns, as the program may rely on. */
CUresult mpsd_submit(struct mpsd_op *op, bool proves);

/* host.c of src/failover: whether the GPU reaches that address, which is the host's. */
bool mpsd_is_pinned(const void *address);
extern struct mpsd_span mpsd_pins_span;	/* around all such memory */

/* These pages are this library's own: the program does not know where they are. */
void mpsd_pins_forget(const void *base);
