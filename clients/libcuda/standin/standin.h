/* SPDX-License-Identifier: MIT */
/*
 * A CUDA driver without a GPU: devices (one, unless MPSD_STANDIN_DEVICES wants more, which share one lot
 * of memory), their primary contexts, streams that are threads,
 * kernels that are host functions, device pointers that the host can follow, but for mapped memory. For
 * tests and benchmarks. A process may have several copies, which share nothing (init.c, reserve.c).
 *
 * One lock guards everything but the work itself, which workers do without it; one condition is
 * signalled at every end of an operation. That is slow and easy to be right about.
 */
#pragma once

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "seam.h"

#define API __attribute__((visibility("default")))
#define DRIVER_VERSION 13000
#define GRANULARITY ((size_t)2 << 20)
#define SHARED_BYTES (48 << 10)		/* of a block, and if a function asks for more */
#define MOST_SHARED_BYTES (227 << 10)
#define MOST_DEVICES 4

extern pthread_mutex_t gpu_lock;
extern pthread_cond_t gpu_changed;
/* Held for reading by whatever follows device pointers, for writing while that changes; taken before gpu_lock. */
extern pthread_rwlock_t gpu_memory;

/* init.c */
extern char pipe_directory[];	/* what CUDA_MPS_PIPE_DIRECTORY was at cuInit; empty: it was not there */

/* gate.c, under the lock */
void gate_find(void);
void gate_forget(void);
void gate_ended(void);		/* one that was let */
bool gate_lets(CUcontext context);	/* the next operation; false: it was waited for a while */
CUresult gate_fault(void);

/* Without the lock, when the call has done what it does and is about to return. */
#define GATE_BEGIN_CAPTURE 1
#define GATE_END_CAPTURE 2
#define GATE_CAPTURE_INFO 4
#define GATE_UNMAP 8
#define GATE_CURRENT 16		/* a context is made current */
#define GATE_HOST 32		/* memory of the host is registered, or allocated */
#define GATE_INIT 64
#define GATE_SYNC 128
#define GATE_PARAMETERS 256
#define GATE_KERNEL 512		/* of a library */
#define GATE_MODULE 2048	/* code is loaded */
#define GATE_LIMIT 4096		/* of a context */
#define GATE_WRITE 8192		/* the host has written to the GPU's memory */
#define GATE_NODE 1024		/* a graph is made node by node, or changed */
#define GATE_MANAGER 16384	/* the resource manager is waited for, by who has unmapped something */
void gate_keep(uint64_t call);

/* Whether the test wants it so; nobody is kept. */
#define GATE_NO_CUT 32768	/* standinCutRange() refuses */
#define GATE_ROOM 65536		/* standinCutRange() of as much as mode `exact` takes at once for its copies */
#define GATE_NO_ROOM_CUT 131072	/* it refuses that */
#define GATE_COPIED 262144	/* a copy within the GPU was given */
#define GATE_NO_UNMAP 524288	/* cuMemUnmap() refuses */
#define GATE_LAUNCH 1048576	/* a kernel is launched */
#define GATE_NO_LAUNCH 2097152	/* that is refused, for memory is short */
#define GATE_UNLOAD 4194304	/* of a module, when it has gone */
#define GATE_LAY 8388608	/* a managed zone is about to be laid */
bool gate_wants(uint64_t what);
CUresult gate_node(CUresult result);	/* as GATE_NODE; passes its argument on */

/* context.c */
struct CUctx_st {
	unsigned int retained;
	unsigned int flags;
	CUdevice device;
	uint32_t peers;			/* devices whose memory it may access too, a bit for each */
	size_t limits[CU_LIMIT_MAX];
	CUresult broken;		/* what every call answers once it is not CUDA_SUCCESS */
	struct CUstream_st *streams;	/* all, the destroyed ones too, until the context ends */
	struct CUstream_st *legacy;	/* the NULL stream */
	bool has_trapped;		/* by its own work, which is why it is `broken` */
	bool has_asked;			/* by manager_called() */
	bool is_watched;		/* by its watcher */
	pthread_t watcher;
	atomic_int staying;		/* it, by its number, when it waits for good */
};

CUcontext current_context(void);	/* the calling thread's; NULL: it has none */
CUresult enter(CUcontext *context);	/* takes the lock if it succeeds, and only then */
CUresult leave(CUresult result);	/* gives it back, and passes its argument on */
CUresult is_initialised(void);
void kill_context(CUcontext context, CUresult reason);
int device_count(void);
bool is_device(CUdevice device);
bool is_any_retained(void);

/* manager.c, with the lock held; it is given back meanwhile where a watcher ends. */
void manager_watch(CUcontext context);
void manager_forget(CUcontext context);
void manager_see(int fd);	/* any time */
void manager_called(CUcontext context);	/* after a query that failed; without the lock */

/* sms.c: a context's objects and its code, by a device of this copy's. */
void sms_make(int device);

/* reserve.c: what the process has mapped by now. */
void note_taken(void);

/* init.c: beside the domain that this copy of the library is in, for a test: a line in the file MPSD_STANDIN_NOTES. */
void note(const char *what);

/* The same, of the domain that MPSD_STANDIN_REFUSES_SAVES names: the proxy's kernel for copies is refused there. */
bool refuses_saves(void);

CUcontext primary_of(CUdevice device);	/* of a device that is; its `retained` may be 0 */
CUdevice current_device(void);		/* that of the current context; 0 without one */
extern __thread CUcontext working_for;	/* in a stream's thread: its context */

/* stream.c */
struct moment {			/* "after operation `number` of `stream`" */
	struct CUstream_st *stream;
	uint64_t number;
};

/* capture.c: nodes of a graph, behind which the next one comes. */
struct place {
	struct CUgraphNode_st **nodes;
	size_t count;
};

struct CUstream_st {
	struct CUstream_st *next;
	CUcontext context;
	unsigned int flags;
	int priority;
	struct operation *first, *last;
	uint64_t submitted, completed;
	pthread_t thread;
	bool started, destroyed, finished, joined;
	bool is_own;				/* of its owner's, as the default stream */
	pthread_t owner;
	struct sequence *capture;		/* that it is in */
	struct place place;			/* and where it is there */
	CUstreamAttrValue attributes[CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN + 1];	/* but its priority */
};

/* Behind those that a kernel was given: how many columns of blocks it has, its module's first variable, rows. */
#define HIDDEN_ARGUMENTS 50

struct operation {
	struct operation *next;
	uint64_t number;
	void (*run)(struct operation *self);	/* without the lock */
	CUgraphNodeType type;			/* of the node that it is in a graph */
	uint64_t duration_ns;
	bool always;				/* in a broken context too: it owes somebody something */
	CUresult status;			/* of the context, when it runs */
	size_t moments;
	struct moment *after;
	union {
		struct {
			const struct builtin *builtin;
			uint64_t arguments[HIDDEN_ARGUMENTS + 3];
		} kernel;
		struct {
			void *to;
			const void *from;
			size_t size, to_pitch, from_pitch, rows;
			size_t to_plane, from_plane, planes;
		} copy;
		struct {
			void *to;
			uint32_t value;
			size_t width, count, pitch, rows;
		} set;
		struct {
			CUhostFn function;
			CUstreamCallback callback;	/* in place of that */
			CUstream stream;
			void *data;
		} host;
		struct {
			CUstreamBatchMemOpParams each[8];
			unsigned int count;
		} memory;
		struct {
			struct CUevent_st *event;
		} event;
		struct {
			struct condition *condition;
			CUgraphConditionalNodeType type;
			unsigned int count;
			struct body **bodies;		/* as they were when it was launched */
		} conditional;
	};
};

CUresult find_stream(CUcontext context, CUstream handle, CUstream *stream);
/* The stream of a call, with the lock held if it is found. */
CUresult enter_stream(CUstream handle, CUstream *stream);
CUresult submit(CUstream stream, const struct operation *operation);
CUresult submit_after(CUstream stream, const struct operation *operation, struct moment moment);
bool reached(struct moment moment);
CUresult wait_for(CUcontext context, struct moment moment);
CUresult wait_for_all(CUcontext context);
CUresult open_streams(CUcontext context);
/* Those whose threads have ended: threads that nobody waits for are a leak. */
void join_streams(CUcontext context);
void close_streams(CUcontext context);

/* looks.c, with the lock held */
void add_nanoseconds(struct timespec *time, uint64_t nanoseconds);
void wait_a_moment(uint64_t nanoseconds);	/* that long, or until something has changed */
void look_at(CUcontext context);	/* has it died of others' doing? */
void look_sometimes(CUcontext context);	/* the same, but not each time, for it is a question to the GPU */
void wait_for_news(CUcontext context);	/* a moment, and such a look */
bool may_begin(CUcontext context, const struct operation *operation);	/* false: the context died meanwhile */
void await_news(CUcontext context);	/* where its channels are halted: what it died of */

/* copy.c: for the calls of rows.c. */
CUresult prepare_box(const CUDA_MEMCPY3D *box, struct operation *operation, bool *wait);	/* with the lock */
CUresult prepare_rows(CUdeviceptr to, size_t pitch, uint32_t value, size_t width, size_t count, size_t rows,
		      struct operation *operation);
CUresult transfer_box(const CUDA_MEMCPY3D *box, CUstream stream, bool wait);
CUresult fill_rows(CUdeviceptr to, size_t pitch, uint32_t value, size_t width, size_t count, size_t rows,
		   CUstream stream, bool wait);

/* event.c */
void close_events(CUcontext context);	/* after its streams */

/* With the lock: what a node of a graph does that records the event, or waits for it; and a launch of that. */
CUresult prepare_event(CUevent event, CUgraphNodeType type, struct operation *operation);
CUresult submit_event(CUstream stream, const struct operation *operation);

/* memops.c: likewise, of memory operations. */
CUresult prepare_memops(const CUDA_BATCH_MEM_OP_NODE_PARAMS *given, struct operation *operation);

/* hostfunc.c: of a function of the host. */
CUresult prepare_host(const CUDA_HOST_NODE_PARAMS *given, struct operation *operation);

#define NODE_ATTRIBUTES (CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT + 1)

/* graph.c */
struct CUgraphNode_st {
	CUgraph graph;
	CUgraphNodeType type;
	struct operation operation;	/* of one that is no graph and not empty */
	CUgraph child;			/* its own */
	bool is_moved;			/* that was the program's */
	CUgraph *bodies;		/* of a conditional node, its own */
	unsigned int bodies_count;
	CUDA_KERNEL_NODE_PARAMS kernel;	/* as it was given, but for what it points to */
	CUDA_MEMCPY3D copy;
	CUDA_MEMSET_NODE_PARAMS set;
	CUgraphNode *after;
	CUgraphEdgeData *data;		/* of each of those edges, which means nothing here; NULL: none has any */
	size_t count;
	CUkernelNodeAttrValue attributes[NODE_ATTRIBUTES];
	struct CUgraphNode_st *original;	/* of the graph that this is a copy of; NULL: of none */
	cuuint64_t capture;		/* the capture that it came by; 0: none */
};

struct CUgraph_st {
	CUgraph next;
	const void *sign;		/* of another copy of this library it is no graph here */
	CUgraphNode *nodes;
	size_t count;
	const struct CUgraph_st *original;	/* that it was cloned from */
	struct condition *conditions;
};

/* conditional.c */
struct condition {
	struct condition *next;
	uint32_t value, initial;
	bool assigns;			/* the initial value, by each launch */
};

struct body {
	size_t count;
	struct operation each[];
};

struct body *new_body(size_t count);	/* NULL: no memory */
bool prepare_conditional(struct operation *operation);	/* for a launch; there is a place for its bodies */
struct operation assignment(struct condition *condition);
CUresult add_conditional(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
			 CUDA_CONDITIONAL_NODE_PARAMS *given);
void disown_graph(CUgraph graph);	/* graph.c: it is a node's from now on */

CUgraph new_graph(void);		/* NULL: no memory */
CUgraph new_child(void);		/* the same, of a node that ends it */
void free_graph(CUgraph graph);
bool is_graph(const struct CUgraph_st *graph);

/* A node goes, and the edges that it has. */
void remove_node(CUgraphNode node);

/* A new node; NULL: no memory. */
CUgraphNode add_node(CUgraph graph, CUgraphNodeType type, const struct operation *operation);
bool is_node(const struct CUgraphNode_st *node);

/* nodes.c: as a call of cuda.h that adds one; with the lock where `operation` needs it. */
CUresult change_node(CUgraphNode node, CUgraphNodeType type, CUresult prepared, const struct operation *operation);
CUresult change_exec(CUgraphExec exec, CUgraphNode node, CUgraphNodeType type, CUresult prepared,
		     const struct operation *operation);
bool are_of(const struct CUgraph_st *graph, const CUgraphNode *nodes, size_t count);
CUresult new_node(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeType type,
		  const struct operation *operation);

/* capture.c, with the lock held. What is given to a stream in a capture: */
CUresult capture(CUstream stream, const struct operation *operation);
bool is_spoiled(const struct CUstream_st *stream);
CUresult spoil(CUstream stream, CUresult result);
/* A stream that goes; with it the capture that began there. */
void drop_capture(CUstream stream);

/* Where an event was recorded last, in a capture of that number; 0: in none. */
struct captured {
	cuuint64_t id;
	struct place place;
};

CUresult capture_record(CUstream stream, struct captured *captured);
/* Of a stream in a capture, or an event that was recorded in one. */
CUresult capture_wait(CUstream stream, const struct captured *captured);
void leave_place(struct place *place);
/* What a capture in the context forbids is refused, and spoils it. `any`: whatever its mode and thread. */
CUresult refuse_in_capture(CUcontext context, bool any);

/* ranges.c: every piece of memory that the driver gave out, by address. The lock is held. */
enum range_kind {
	RANGE_DEVICE,
	RANGE_OPENED,		/* device memory of another process */
	RANGE_HOST,
	RANGE_REGISTERED,
	RANGE_RESERVED,
	RANGE_MAPPED,
	RANGE_MANAGED,			/* these two absorb stray accesses */
	RANGE_SPARSE,
};

struct range {
	uintptr_t base;
	size_t size;
	enum range_kind kind;
	bool readable, writable;
	CUdevice device;		/* that of the context which it was made in */
	uint32_t devices;		/* of RANGE_MAPPED: those that may access it, a bit for each */
	bool sync_memops;
	struct physical *physical;	/* of RANGE_MAPPED */
	bool is_cut;			/* of RANGE_MAPPED: it leads nowhere, and is there for cuMemUnmap() alone */
	char *alias;			/* of RANGE_RESERVED: where its memory is mapped in truth */
	bool placeholder;		/* of RANGE_RESERVED: the place itself is still taken by it */
	off_t offset;			/* of RANGE_DEVICE in the file of memory.c */
	size_t taken;			/* of the GPU's bytes, by RANGE_DEVICE */
	CUmemoryPool pool;		/* that it was allocated from */
	pid_t exporter;			/* of RANGE_OPENED, with its id there and how often it is open */
	unsigned long long exported_id;
	unsigned int references;
	unsigned long long id;
};

struct range *range_at(uintptr_t address, enum range_kind first, enum range_kind last);
struct range *range_from(uintptr_t base, enum range_kind kind);
CUresult add_range(struct range range);
void remove_range(struct range *range);
struct range *first_range(enum range_kind kind, CUdevice device);	/* made in that device's context */
struct range *next_range(uintptr_t address, enum range_kind kind);	/* at or above */
bool is_range_free(uintptr_t base, size_t size, enum range_kind kind);
/*
 * `size` where all of it may be accessed, by a kernel of that context or (NULL) by a copy; else how many
 * bytes before the first that may not.
 */
size_t accessible(uintptr_t address, size_t size, enum access access, CUcontext context);
bool may_access(uintptr_t address, size_t size, enum access access);
void *gpu_pointer(uintptr_t address);	/* the host's way there, under gpu_memory */
void forget_ranges(void);

/* reserve.c */
void close_reservations(void);

/* vmm.c */
/* For what changes where device pointers lead: nobody follows one meanwhile. */
void lock_memory(void);
CUresult leave_memory(CUresult result);

CUdevice physical_device(const struct physical *physical);
void close_physical(void);

/* zones.c */
void close_zones(CUdevice device);

/* memory.c */
CUresult device_alloc(uintptr_t *address, size_t size);
CUresult device_free(uintptr_t address);
int device_file(void);		/* where all device memory of this process is */
void close_device_file(void);

/* pools.c */
void pool_took(CUmemoryPool pool, size_t size);
void pool_got(CUmemoryPool pool, size_t size);
void close_pools(void);

/* ipc.c */
void close_opened(CUdevice device);
void close_memory(CUdevice device);

/* graves.c */
void is_gone(const void *handle);
void is_new(const void *handle);
void must_live(const void *handle);

/* module.c */
struct builtin {
	const char *name;
	size_t parameters;
	size_t sizes[8];
	void (*run)(const uint64_t *arguments);
};

struct CUfunc_st {
	char name[64];
	const struct builtin *builtin;
	uint64_t duration_ns;
	bool loaded;			/* as a driver that loads lazily says it */
	struct CUmod_st *module;
	struct CUfunc_st *next;
	int attributes[CU_FUNC_ATTRIBUTE_MAX];
};

void close_modules(CUdevice device);
CUresult prepare_kernel(const CUDA_KERNEL_NODE_PARAMS *given, struct operation *operation);	/* with the lock */
void start_attributes(struct CUfunc_st *function);

struct standin_table {
	size_t bytes;
	CUresult (*find)(CUfunction *function, CUmodule module, const char *name);
};
extern const struct standin_table standin_table;	/* what cuGetExportTable answers with */

struct CUfunc_st *find_function(const struct CUfunc_st *handle);	/* NULL if it is none */
uintptr_t first_global(const struct CUfunc_st *function);		/* of its module; 0: there is none */
const struct builtin *find_builtin(const char *name);
