/* SPDX-License-Identifier: MIT */
/*
 * What the program has made, and how it is made again in another copy of the driver: one record for each
 * thing that has a name (a handle) or must be so in the next context too. In the order in which it was made.
 */
#pragma once

#include "failover/carry.h"

enum mpsd_made_kind {
	MPSD_MADE_CONTEXT,
	MPSD_MADE_STREAM,
	MPSD_MADE_EVENT,
	MPSD_MADE_MODULE,
	MPSD_MADE_LIBRARY,
	MPSD_MADE_LIBRARY_MODULE,
	MPSD_MADE_FUNCTION,
	MPSD_MADE_KERNEL,
	MPSD_MADE_KERNEL_FUNCTION,
	MPSD_MADE_VARIABLE,	/* the name is its address, size: of it */
	MPSD_MADE_HOST,		/* pages that the GPU reaches; the name is that of mpsd_made_pages() */
	MPSD_MADE_LIMIT,	/* settings: what, value */
	MPSD_MADE_FUNCTION_ATTRIBUTE,
	MPSD_MADE_KERNEL_ATTRIBUTE,
	MPSD_MADE_FUNCTION_CACHE,
	MPSD_MADE_KERNEL_CACHE,
	MPSD_MADE_CONTEXT_CACHE,
	MPSD_MADE_PRIMARY_FLAGS,
	MPSD_MADE_STREAM_ATTRIBUTE,
	MPSD_MADE_GRAPH,	/* these two are made in another copy when they are needed there (rebuild.c), */
	MPSD_MADE_EXEC,		/* or sooner (ahead.c) */
	MPSD_MADE_NODE,		/* of a graph; size: its number there */
	MPSD_MADE_CONDITION,	/* a handle of a conditional node, of its graph (embedded.h) */
	MPSD_MADE_LINK,		/* likewise (link.c) */
};

/* Of an event: `moves` before the copy in which it was recorded last; in ns, when, and when the program knew of it. */
struct mpsd_moments {
	uint64_t moves, recorded, reached;
};

/* What an executable graph was put together from, and what its nodes are called, by their numbers in such a graph (nodes.h). */
struct mpsd_put {
	CUgraph graph;
	CUgraphNode *nodes;
	uint64_t descent;
	/* What graphs that are embedded in it have: handles of conditional nodes, its own too; and nodes. By name and native. */
	struct mpsd_pairs {
		unsigned int count, room;
		struct mpsd_pair {
			uint64_t name, native;
		} *each;
	} conditions, embedded;
};

/* What it has in memory is freed, but not what the driver has. */
void mpsd_put_forget(struct mpsd_put *put);

struct mpsd_made {
	struct mpsd_made *next_name, *next_native;	/* in their buckets */
	struct mpsd_made *older, *newer;
	enum mpsd_made_kind kind;
	void *name;			/* what the program calls it; NULL for a setting */
	void *native;			/* what the copy in use does */
	void *twin;			/* and the standby's, once it is there */
	bool is_twin;
	struct mpsd_made *of;		/* the module of a function, and so on */
	uint64_t since;			/* `moves` before the copy in which it was made first */
	CUdevice device;		/* that was current, or whose primary context it is */
	unsigned int flags;		/* of a context: how often it was retained */
	unsigned int twin_flags;	/* and its twin */
	bool is_rehearsed;		/* of code: rehearsal.c has seen its twin */
	bool listed;			/* one of all that are in a module: who knows whether it is used */
	int what, value;		/* of a setting; value: a stream's priority */
	size_t size;			/* of pages, a limit */
	CUstreamAttrValue *attribute;	/* of a stream */
	char *text;			/* a function's name, a file's */
	struct mpsd_image *image;
	struct mpsd_graph *graph;	/* one reference to it */
	struct mpsd_link *link;
	struct mpsd_parts *parts;	/* of a variable that is about to end */
	struct mpsd_put put, twin_put;	/* of an executable graph, in another copy than its first */
	unsigned int changes;		/* of that */
	bool is_stale;			/* its twin is what it was before the last one */
	struct mpsd_moments times;	/* read and written at once, without the lock */
};

/* How many have no twin. */
extern atomic_uint mpsd_made_waiting;

/* All under this lock, which is taken after that of the windows (windows.h), where both are. */
void mpsd_made_lock(void);
void mpsd_made_unlock(void);
void mpsd_made_child(void);
void mpsd_made_lock_child(void);
void mpsd_made_short(void);		/* of names or memory: said when the lock is given */

/*
 * Under the lock: the record whose twin is being made, without the lock, for that may take long; NULL: none. Who would
 * end it waits. let_go(): false where it has changed since hold().
 */
struct mpsd_made *mpsd_made_held(void);
void mpsd_made_hold(struct mpsd_made *made);
bool mpsd_made_let_go(void);
void mpsd_made_changed(const struct mpsd_made *made);
bool mpsd_made_wait(void);		/* without the lock meanwhile; true */
bool mpsd_made_is_awaited(void);	/* without the lock: whether anybody waits */

/*
 * Add a record for what a call made that began when mpsd_moves was `moves`. False: a move came between, and
 * what was made belongs to the old copy (of what is made late: that was left; a move that does not come about is none). `record` is copied; `native` is its name too where nobody else has
 * that.
 */
bool mpsd_made_add(struct mpsd_made *record, uint64_t moves);

/*
 * The record of a function. One that came by a way that is not followed (a private table of the driver's) is made, where
 * the driver says what it is called and of what it is; NULL: it does not.
 */
struct mpsd_made *mpsd_made_learn(CUfunction function);

/* As add, in place of an earlier record of the same setting; then its attribute is taken. */
bool mpsd_made_set(struct mpsd_made *record, uint64_t moves);

/* Under the lock: what it is called by the copy in use, where that did not have it yet. */
void mpsd_made_native(struct mpsd_made *made, void *native);

/* A function or kernel that the program has asked for by its name. */
static inline bool mpsd_made_is_code(const struct mpsd_made *made)
{
	return made->kind >= MPSD_MADE_FUNCTION && made->kind <= MPSD_MADE_KERNEL_FUNCTION && !made->listed;
}

/* What is made in another copy when it is needed there, and has no twin. */
static inline bool mpsd_made_is_late(enum mpsd_made_kind kind)
{
	return kind == MPSD_MADE_GRAPH || kind == MPSD_MADE_EXEC || kind == MPSD_MADE_NODE || kind == MPSD_MADE_LINK ||
	       kind == MPSD_MADE_CONDITION;
}

/*
 * Without the lock: what this copy calls such a thing, made by `make` where it is not there yet; with the lock, so that
 * it is made once. AGAIN: the copy was left.
 */
CUresult mpsd_made_late(const void *name, void **native, CUresult (*make)(struct mpsd_made *made, void **native));

/* Under the lock: of a graph or an executable one, what it consists of from now on; takes that reference. */
void mpsd_made_regraph(struct mpsd_made *made, struct mpsd_graph *graph);

/* Without the lock: what was the program's is another record's from now on, and ends with it. False: it is not known. */
bool mpsd_made_move_into(const void *name, struct mpsd_made *of);

/* Its twin is not as it should be: it is made once more. False as of mpsd_made_add(). */
bool mpsd_made_again(const void *name, uint64_t moves);

/* Without the lock: a stream that the legacy one does not wait for. */
bool mpsd_made_is_apart(const void *name);

/* Without the lock. */
bool mpsd_made_is(const void *name, enum mpsd_made_kind kind);

/* Without the lock: that record, which lives until looked(). NULL: nothing of that name. */
struct mpsd_made *mpsd_made_look(const void *name);
void mpsd_made_looked(void);

/* Without the lock: a reference to that of a graph or an executable one; NULL: it has none. */
struct mpsd_graph *mpsd_made_graph(const void *name);

/* Whether it is CU_STREAM_LEGACY or the like, which every copy has. */
bool mpsd_made_is_word(const void *name);

/*
 * Of pages of the host's at that address, and the other way round. Where a handle of an earlier copy's was, which the
 * program still has, there may be memory of the program's by now: an address is no name. No address is like these.
 */
static inline void *mpsd_made_pages(const void *address)
{
	return (void *)~(uintptr_t)address;
}

/* Under the lock. NULL: nothing of that name. */
struct mpsd_made *mpsd_made_find(const void *name);

/* Under the lock: the module, or the library, that it comes from; NULL: from none. */
static inline const struct mpsd_made *mpsd_made_origin(const struct mpsd_made *made)
{
	while (made && made->kind != MPSD_MADE_MODULE && made->kind != MPSD_MADE_LIBRARY)
		made = made->of;
	return made;
}

/* The same, without the lock: what the call is given lives until it returns. */
struct mpsd_made *mpsd_made_known(const void *name);

/* Of the calling thread's context; -1: it has none. */
CUdevice mpsd_current_device(void);

/* asked.c: a thing that another thread may end, in a call of the driver that this library makes by itself. */
struct mpsd_asked {
	struct mpsd_asked *next;
	void *native;		/* in the copy of this call */
	uint64_t moves;
};

/* Of what the program calls `name`; its end waits for mpsd_ask_end(). False: it has ended, or the copy was left. */
bool mpsd_ask_begin(struct mpsd_asked *asked, const void *name);
void mpsd_ask_end(const struct mpsd_asked *asked);

/*
 * What has no record any more is about to end: returns when nobody asks. False: the copy was left meanwhile, and nothing
 * is to be ended there.
 */
bool mpsd_asked_ends(const void *native, uint64_t moves);
void mpsd_asked_child(void);

/* poll.c: cuStreamQuery of a stream that another thread may end. NOT_FOUND: it has ended, or the copy was left. */
CUresult mpsd_poll_ask(CUstream name);

/*
 * The program ends it: what is of it goes too, and its twin. False: nothing goes, for a move came since the call
 * began, when there had been that many `moves`. True: mpsd_made_ended() comes next, by the same thread.
 */
bool mpsd_made_end(const void *name, uint64_t moves);

/*
 * What the driver then said of it, in the copy of then: the record of what it refuses to end is there as before. Its twin
 * is gone: after a move it has ended all the same.
 */
CUresult mpsd_made_ended(CUresult result, uint64_t moves);

/* For the thread of line.c */

/* Make what has no twin yet. False: `what` could not be made, so there is no standby. */
bool mpsd_made_twins(const char **what);

/* By the same thread: whether there were functions or kernels among them since it was asked last. */
bool mpsd_made_take_code(void);

/* host.c: in a forked child. */
void mpsd_pins_child(void);

/* Whether anything has none. */
bool mpsd_made_waits(void);

/* The standby has gone: nothing has a twin. */
void mpsd_made_no_twins(void);

/* Under the lock, in a move: the twins are what is in use now. */
void mpsd_made_move(void);

/* Under the lock: the record of a device's primary context; NULL if it has none. */
struct mpsd_made *mpsd_made_context(CUdevice device);

/* current.c: of the first GPU with one; NULL: there is none. Under the lock. */
struct mpsd_made *mpsd_made_first_context(void);

/* On a thread of this library's, which has none of the program's contexts: that one. */
CUresult mpsd_enter_context(void);

/* Under the lock: all records, in their order. */
struct mpsd_made *mpsd_made_oldest(void);

/* twins.c, under the lock: make a record's thing in the standby. False: `what` does not work there. */
bool mpsd_twin_make(struct mpsd_made *made, const char **what);

/* The same: its end, of the kinds that have one of their own. The rest goes with what it is of. */
void mpsd_twin_end(struct mpsd_made *made);

/* variable.c: what the program has put into a variable, into its twin. */
CUresult mpsd_variable_fill(const void *name, CUdeviceptr twin);
struct mpsd_parts *mpsd_variable_take(const void *name);	/* and nobody has it: where it is there may be another soon */
void mpsd_variable_give(const void *name, struct mpsd_parts *parts);
void mpsd_variable_drop(struct mpsd_parts *parts);

/* Links under way */
struct mpsd_link;
void mpsd_link_free(struct mpsd_link *link);

/* Images of modules */
struct mpsd_image;
struct mpsd_image *mpsd_image_keep(const void *image, unsigned int options, const CUjit_option *names,
				   void **values);
void mpsd_image_free(struct mpsd_image *image);
bool mpsd_image_writes(CUjit_option name);	/* the program's memory, when it is loaded */
struct mpsd_image *mpsd_image_read(const char *path);	/* NULL: it cannot be, or no memory */
const void *mpsd_image_data(const struct mpsd_image *image);	/* NULL: it is there no more */
size_t mpsd_image_bytes(const struct mpsd_image *image);	/* 0: it does not say */
unsigned int mpsd_image_options(const struct mpsd_image *image, const CUjit_option **names, void ***values);
