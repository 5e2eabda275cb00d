/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * What becomes of a fatal fault, and of the client that made it. No kernel headers, no locks, no clock, no
 * allocation: the caller serializes all calls that share a space, and gives the time (monotonic, in ns).
 *
 *	mpsd_policy_decide()	SINK: make the sink, then mpsd_policy_sunk(), or mpsd_policy_failed()
 *				NONE, REPORTED, REFUSED: the stock driver answers
 *				SUNK_BEFORE: the replay finds the earlier sink; with `renew` or `relink` do
 *				that first, or mpsd_policy_failed()
 *	mpsd_policy_deadline()	when `deadline_ns` is reached: the step to take against the space
 *
 * A space that had a fault sunk is condemned: its client computes with wrong values and sees no error, so it
 * must go, and nothing makes it innocent again. In all of these structures 0 is what does least.
 */
#ifndef MPSD_POLICY_H
#define MPSD_POLICY_H

#include "mpsd-abi.h"

#ifndef __KERNEL__
#include <stdbool.h>
#include <stddef.h>
#endif

#define MPSD_PAGE_BYTES 0x1000ULL
#define MPSD_BIG_PAGE_BYTES 0x10000ULL
#define MPSD_MAX_SINK_BYTES 0x200000ULL

#define MPSD_LOOP_HITS 3U		/* later batches that may show a sunk page */
#define MPSD_PATIENCE 10U		/* deadlines that an acknowledgement, or a kill, is given */
#define MPSD_DEADLINE_MIN_MS 10U
#define MPSD_DEADLINE_MAX_MS 60000U
#define MPSD_DEADLINE_DEFAULT_MS 2000U
#define MPSD_ORPHAN_INTERVAL_NS 100000000ULL
#define MPSD_MAX_SINKS_DEFAULT 1024U
#define MPSD_MAX_SINKS_LIMIT 65536U

struct mpsd_policy_params {
	__u32 mode;			/* enum mpsd_mode; what it does not name is off */
	__u32 deadline_ms;		/* taken as MPSD_DEADLINE_MIN_MS to MPSD_DEADLINE_MAX_MS */
	__u32 max_sinks;		/* of a space, on all GPUs; at most MPSD_MAX_SINKS_LIMIT */
	bool nonreplayable;
	bool stop_channels;		/* MPSD_ACTION_STOP is one of the steps */
};

struct mpsd_fault {
	__u64 address;
	/*
	 * The same for all faults of one pass over the fault buffer, another one in every other pass: what is in the
	 * buffer together tells nothing of a sink that is made meanwhile.
	 */
	__u64 batch;
	__u8 fault_type;		/* enum mpsd_fault_type */
	__u8 access;			/* enum mpsd_access */
	__u8 uvm_reason;		/* enum mpsd_uvm_reason */
	__u8 engine;			/* enum mpsd_engine */
	__u8 client_type;		/* enum mpsd_client_type */
	bool fatal;			/* UVM's word on this very entry */
	bool replayable;
};

enum mpsd_range {
	MPSD_RANGE_UNKNOWN = 0,
	MPSD_RANGE_FREE,		/* no range holds the address */
	MPSD_RANGE_HOLE,		/* a range of external memory does, with nothing mapped there */
	MPSD_RANGE_MAPPED,		/* external memory is mapped there */
	MPSD_RANGE_MANAGED,		/* blocks, and what HMM has there */
	MPSD_RANGE_PROTECTED,		/* channels, SKED, semaphore pools */
};

/* Of the caller's, one for each sink; a GPU's sinks do not overlap. */
struct mpsd_sink {
	__u64 base;
	__u64 bytes;
	__u64 batch;			/* the last one that showed it */
	__u32 hits;			/* batches after the one that made it */
};

/* What the caller knows of the address on that GPU. */
struct mpsd_around {
	struct mpsd_sink *sink;		/* the sink that covers the address, or NULL */
	/* A sink in the same 2 MiB, where something is mapped at the address by smaller pages; or NULL. */
	struct mpsd_sink *beside;
	__u64 free_first;		/* the gap without ranges, mappings and sinks: first and last byte */
	__u64 free_last;
	__u32 range;			/* enum mpsd_range */
	bool can_address;
	bool hmm;			/* the gap does not tell of what HMM maps */
	bool ats;
	bool alone;			/* no other address space has channels in a group of the space's */
};

struct mpsd_decision {
	__u32 action;			/* enum mpsd_action; MPSD_ACTION_SUNK before it is done, too */
	__u32 why;			/* enum mpsd_why */
	__u64 base;			/* the sink: a power of two, aligned to itself, inside the gap */
	__u64 bytes;
	__u64 page_bytes;		/* of the PTEs to write: MPSD_PAGE_BYTES or MPSD_BIG_PAGE_BYTES */
	bool report;			/* put a record */
	/* Of SUNK_BEFORE, one of the two at most: */
	bool renew;			/* the sink's PTEs, and what points to them, may not be there any more */
	bool relink;			/* what points to the table of the address's PTE may not be */
};

/* The policy's state of a VA space. Zeroes are a new one. */
struct mpsd_space {
	__u64 condemned_ns;
	__u64 deadline_ns;		/* when the next step is due; 0: no step is to come */
	__u32 faults;
	__u32 sinks;
	__u32 next_step;		/* enum mpsd_action; NONE: no step is to come */
	bool condemned;
	bool acknowledged;
	bool kill_asked;		/* no acknowledgement puts that off */
	bool released;
	bool ended;
	__u32 seen[2][MPSD_WHY_COUNT];	/* of reported and of refused ones */
};

/* Of a GPU, for faults of work whose address space is gone. Zeroes are a new one. */
struct mpsd_orphans {
	__u32 faults;
	__u64 reported_ns;
};

enum mpsd_answer {
	MPSD_ANSWER_OK = 0,
	MPSD_ANSWER_INNOCENT,		/* the space is not condemned */
	MPSD_ANSWER_ALREADY,		/* KILL was taken or asked for, or the space ends */
};

void mpsd_policy_decide(const struct mpsd_policy_params *params, struct mpsd_space *space,
			const struct mpsd_fault *fault, const struct mpsd_around *around,
			struct mpsd_decision *decision);

/* The sink that was decided is in force: fills `sink`, condemns the space, starts its deadline. */
void mpsd_policy_sunk(const struct mpsd_policy_params *params, struct mpsd_space *space,
		      const struct mpsd_fault *fault, struct mpsd_decision *decision,
		      struct mpsd_sink *sink, __u64 now_ns);

/* The sink that was decided could not be made: the decision becomes a refusal. */
void mpsd_policy_failed(struct mpsd_space *space, struct mpsd_decision *decision);

/* True if the stock driver must not answer the fault. */
bool mpsd_policy_isolates(const struct mpsd_decision *decision);

/*
 * The step that is due, MPSD_ACTION_NONE if none is; call it until it says so. Each comes once: KILL, STOP
 * (if the parameters say so) and GIVE_UP, with at least a deadline between two however late the caller is.
 */
enum mpsd_action mpsd_policy_deadline(const struct mpsd_policy_params *params, struct mpsd_space *space,
				      __u64 now_ns);

/* Who asks evicts the client himself: KILL waits for MPSD_PATIENCE deadlines after the first sink. */
enum mpsd_answer mpsd_policy_acknowledge(const struct mpsd_policy_params *params, struct mpsd_space *space);

/* Who acknowledged has gone: KILL comes after one deadline from now, if not sooner. */
void mpsd_policy_abandoned(const struct mpsd_policy_params *params, struct mpsd_space *space, __u64 now_ns);

/* KILL is due now. */
enum mpsd_answer mpsd_policy_kill(struct mpsd_space *space, __u64 now_ns);

/* No fault of the space is sunk any more. Steps go on. */
void mpsd_policy_release(struct mpsd_space *space);

/* The space is being destroyed, its channels are stopped: no step is to come. Faults are sunk to the end. */
void mpsd_policy_ended(struct mpsd_space *space);

/*
 * An orphan's fault: true if it is to be reported (never in mode off), at most once per
 * MPSD_ORPHAN_INTERVAL_NS. Counts them all.
 */
bool mpsd_policy_orphan(const struct mpsd_policy_params *params, struct mpsd_orphans *orphans, __u64 now_ns);

/*
 * Fill what the policy knows of a record and zero the rest. A fault of the space has its decision. A step has
 * neither fault nor decision, an orphan's fault has no decision: there `action` says what the record is.
 */
void mpsd_policy_describe(const struct mpsd_policy_params *params, const struct mpsd_space *space,
			  const struct mpsd_fault *fault, const struct mpsd_decision *decision,
			  enum mpsd_action action, struct mpsd_record *record);

#endif
