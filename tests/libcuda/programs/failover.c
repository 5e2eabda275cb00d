// SPDX-License-Identifier: MIT
/*
 * Threads create, use and destroy all objects that a fail-over carries over, while the test moves the program between
 * driver instances: for sanitizers. Each line of its input is answered, once each thread has done more rounds, with
 * the number of rounds that moves have spoilt and of waits that reported that. The program ends with its input. With a
 * second argument the threads start at the first line.
 *
 * Only work in flight may be missing. Data that a thread keeps is written once and checked in each round.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

#define THREADS 4
#define WORDS 4096
#define BYTES (WORDS * sizeof(uint32_t))
#define ROWS 16
#define PITCH (BYTES / ROWS)
#define ROUNDS 2
#define DEADLINE_S 30
#define IMAGE "standin module\nkernel fill fill 20\nkernel add add 20\n"

#define MUST(name, ...) must(CU(name)(__VA_ARGS__), #name)
#define WAIT(name, ...) waited(CU(name)(__VA_ARGS__), #name)

struct worker {
	pthread_t thread;
	uint32_t number, round;		/* round: under `lock` */
	CUcontext context;
	CUstream stream;		/* as old as the thread */
	CUmodule module;
	CUfunction add;
	CUdeviceptr kept, noded;
	CUgraph graph;			/* as old as the thread: it clears `noded`, and adds to that */
	CUgraphNode adds;
	CUgraphExec exec;
	uint32_t *pinned, *host;	/* pinned: as old as the thread */
	atomic_uint added, told;	/* host callbacks and stream callbacks that ran */
	unsigned int to_tell;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static atomic_bool ending;
static atomic_uint spoilt, told;

static void must(CUresult result, const char *what)
{
	if (result != CUDA_SUCCESS) {
		fprintf(stderr, "%s: %d\n", what, (int)result);
		_exit(1);
	}
}

/* Work in flight in a move is lost, which one wait reports. */
static void waited(CUresult result, const char *what)
{
	if (result == CUDA_ERROR_LAUNCH_FAILED)
		atomic_fetch_add(&told, 1);
	else
		must(result, what);
}

static int all_are(const uint32_t *words, uint32_t value)
{
	int are = 1;

	for (int i = 0; i < WORDS; i++)
		are &= words[i] == value;
	return are;
}

static void launch(CUfunction function, CUdeviceptr to, uint32_t value, CUstream stream)
{
	uint64_t words = WORDS;
	void *values[] = { &to, &words, &value };

	MUST(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, stream, values, NULL);
}

static CUDA_MEMCPY2D rows(void *to, CUdeviceptr from)
{
	return (CUDA_MEMCPY2D){
		.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = from, .srcPitch = PITCH,
		.dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = to, .dstPitch = PITCH,
		.WidthInBytes = PITCH, .Height = ROWS,
	};
}

static void look_at_what_is_kept(struct worker *self)
{
	uint32_t pageable[WORDS] = { 0 };
	CUDA_MEMCPY2D plane = rows(pageable, self->kept);

	memset(self->host, 0, BYTES);
	WAIT(cuMemcpyDtoH, self->host, self->kept, BYTES);
	must(all_are(self->host, self->number) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN, "what is kept");
	MUST(cuMemcpy2D, &plane);
	must(all_are(pageable, self->number) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN, "rows of what is kept");
}

static void *image(void)
{
	return strdup(IMAGE);
}

/* All objects are created and destroyed in this round. */
static int fresh_things(struct worker *self)
{
	uint32_t value = self->number << 16 | self->round;
	CUdeviceptr data;
	CUfunction fill;
	CUmodule module;
	CUstream stream;
	CUevent event;
	void *text = image(), *pinned;
	int are;

	MUST(cuModuleLoadData, &module, text);
	free(text);
	MUST(cuModuleGetFunction, &fill, module, "fill");
	MUST(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
	MUST(cuStreamCopyAttributes, stream, self->stream);
	MUST(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
	MUST(cuMemHostAlloc, &pinned, BYTES, 0);
	MUST(cuMemAlloc, &data, BYTES);
	launch(fill, data, value, stream);
	MUST(cuEventRecord, event, stream);
	MUST(cuStreamWaitEvent, self->stream, event, 0);
	launch(self->add, data, 1, self->stream);
	WAIT(cuEventSynchronize, event);
	WAIT(cuStreamSynchronize, self->stream);
	memset(pinned, 0, BYTES);
	MUST(cuMemcpyDtoHAsync, pinned, data, BYTES, stream);
	WAIT(cuStreamSynchronize, stream);
	are = all_are(pinned, value + 1);
	MUST(cuMemFreeHost, pinned);
	MUST(cuMemFree, data);
	MUST(cuEventDestroy, event);
	MUST(cuStreamDestroy, stream);
	MUST(cuModuleUnload, module);
	return are;
}

/* Objects that live as long as the thread. */
static int old_things(struct worker *self)
{
	CUstreamAttrValue policy = { .syncPolicy = self->round & 2 ? CU_SYNC_POLICY_SPIN : CU_SYNC_POLICY_YIELD };
	CUstreamAttrValue now_policy = { .syncPolicy = CU_SYNC_POLICY_AUTO };
	uint32_t value = self->round;
	CUDA_MEMCPY2D plane;
	CUdeviceptr data;
	CUcontext now;

	MUST(cuCtxGetCurrent, &now);
	must(now == self->context ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN, "the context");
	MUST(cuCtxSetCurrent, NULL);
	MUST(cuCtxSetCurrent, self->context);
	MUST(cuStreamSetAttribute, self->stream, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &policy);
	MUST(cuStreamGetAttribute, self->stream, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &now_policy);
	must(now_policy.syncPolicy == policy.syncPolicy ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN, "the policy");
	MUST(cuMemAlloc, &data, (size_t)4 << 20);
	MUST(cuMemsetD2D32Async, data, PITCH, value, PITCH / sizeof(uint32_t), ROWS, self->stream);
	launch(self->add, data, self->number, self->stream);
	memset(self->pinned, 0, BYTES);
	plane = rows(self->pinned, data);
	MUST(cuMemcpy2DAsync, &plane, self->stream);
	WAIT(cuCtxSynchronize);
	MUST(cuMemFree, data);
	return all_are(self->pinned, value + self->number);
}

static void CUDA_CB add_one(void *data)
{
	struct worker *self = data;

	for (int i = 0; i < WORDS; i++)
		self->pinned[i]++;
	atomic_fetch_add(&self->added, 1);
}

static void CUDA_CB tell(CUstream stream, CUresult status, void *data)
{
	struct worker *self = data;

	must(stream == self->stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE, "the stream of a callback");
	/* The work before it was lost. */
	if (status != CUDA_SUCCESS)
		atomic_fetch_add(&spoilt, 1);
	atomic_fetch_add(&self->told, 1);
}

/* A host callback changes copied-out data, which is copied in and out again: exactly once. */
static int hosted_things(struct worker *self)
{
	unsigned int before = atomic_load(&self->added);
	CUdeviceptr data;

	MUST(cuMemAlloc, &data, BYTES);
	MUST(cuMemsetD32Async, data, self->round, WORDS, self->stream);
	MUST(cuMemcpyDtoHAsync, self->pinned, data, BYTES, self->stream);
	MUST(cuLaunchHostFunc, self->stream, add_one, self);
	MUST(cuMemcpyHtoDAsync, data, self->pinned, BYTES, self->stream);
	MUST(cuStreamAddCallback, self->stream, tell, self, 0);
	self->to_tell++;
	launch(self->add, data, self->number, self->stream);
	WAIT(cuStreamSynchronize, self->stream);
	memset(self->pinned, 0, BYTES);
	MUST(cuMemcpyDtoHAsync, self->pinned, data, BYTES, self->stream);
	WAIT(cuStreamSynchronize, self->stream);
	MUST(cuMemFree, data);
	must(atomic_load(&self->added) - before <= 1 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN, "a function ran twice");
	return all_are(self->pinned, self->round + 1 + self->number);
}

static CUDA_KERNEL_NODE_PARAMS node_that_adds(struct worker *self, void **values)
{
	return (CUDA_KERNEL_NODE_PARAMS){ .func = self->add, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1,
					  .blockDimX = 32, .blockDimY = 1, .blockDimZ = 1, .kernelParams = values };
}

static void make_graph(struct worker *self)
{
	CUDA_MEMSET_NODE_PARAMS clear = { .dst = self->noded, .elementSize = 4, .width = WORDS, .height = 1 };
	uint64_t words = WORDS;
	uint32_t value = 0;
	void *values[] = { &self->noded, &words, &value };
	CUDA_KERNEL_NODE_PARAMS add = node_that_adds(self, values);
	CUgraphNode clears;

	MUST(cuGraphCreate, &self->graph, 0);
	MUST(cuGraphAddMemsetNode, &clears, self->graph, NULL, 0, &clear, self->context);
	MUST(cuGraphAddKernelNode, &self->adds, self->graph, &clears, 1, &add);
	MUST(cuGraphInstantiate, &self->exec, self->graph, 0);
}

/* One graph is changed in each round; another is created with the first as its child, and destroyed. */
static int graphs_of_nodes(struct worker *self)
{
	uint64_t words = WORDS;
	uint32_t value = self->round + 1;
	void *values[] = { &self->noded, &words, &value };
	CUDA_KERNEL_NODE_PARAMS add = node_that_adds(self, values);
	CUgraphExecUpdateResultInfo info;
	CUgraphNode child, last;
	CUgraphExec exec;
	CUgraph graph;

	if (self->round % 2) {
		MUST(cuGraphExecKernelNodeSetParams, self->exec, self->adds, &add);
	} else {
		MUST(cuGraphKernelNodeSetParams, self->adds, &add);
		MUST(cuGraphExecUpdate, self->exec, self->graph, &info);
	}
	MUST(cuGraphLaunch, self->exec, self->stream);
	MUST(cuGraphCreate, &graph, 0);
	MUST(cuGraphAddKernelNode, &last, graph, NULL, 0, &add);
	MUST(cuGraphAddChildGraphNode, &child, graph, NULL, 0, self->graph);
	MUST(cuGraphAddDependencies, graph, &child, &last, NULL, 1);
	MUST(cuGraphInstantiate, &exec, graph, 0);
	MUST(cuGraphLaunch, exec, self->stream);
	MUST(cuGraphDestroy, graph);
	memset(self->pinned, 0, BYTES);
	MUST(cuMemcpyDtoHAsync, self->pinned, self->noded, BYTES, self->stream);
	WAIT(cuStreamSynchronize, self->stream);
	MUST(cuGraphExecDestroy, exec);
	/* The graph is as it was in the latest even round. */
	return all_are(self->pinned, value + value - self->round % 2);
}

/* Another thread runs the callbacks of lost work. */
static void wait_until_told(struct worker *self)
{
	for (int ms = 0; atomic_load(&self->told) < self->to_tell && ms < 1000 * DEADLINE_S; ms++)
		usleep(1000);
	must(atomic_load(&self->told) == self->to_tell ? CUDA_SUCCESS : CUDA_ERROR_TIMEOUT, "callbacks");
}

static void begin(struct worker *self)
{
	void *text = image();

	MUST(cuCtxSetCurrent, self->context);
	MUST(cuModuleLoadData, &self->module, text);
	free(text);
	MUST(cuModuleGetFunction, &self->add, self->module, "add");
	MUST(cuStreamCreate, &self->stream, CU_STREAM_NON_BLOCKING);
	MUST(cuMemAllocHost, (void **)&self->pinned, BYTES);
	self->host = malloc(BYTES);
	MUST(cuMemHostRegister, self->host, BYTES, 0);
	MUST(cuMemAlloc, &self->kept, BYTES);
	MUST(cuMemsetD32, self->kept, self->number, WORDS);
	MUST(cuMemAlloc, &self->noded, BYTES);
	make_graph(self);
	WAIT(cuCtxSynchronize);
}

static void end(struct worker *self)
{
	wait_until_told(self);
	MUST(cuGraphExecDestroy, self->exec);
	MUST(cuGraphDestroy, self->graph);
	MUST(cuMemFree, self->noded);
	MUST(cuMemFree, self->kept);
	MUST(cuMemHostUnregister, self->host);
	free(self->host);
	MUST(cuMemFreeHost, self->pinned);
	MUST(cuStreamDestroy, self->stream);
	MUST(cuModuleUnload, self->module);
}

static void *work(void *argument)
{
	struct worker *self = argument;

	begin(self);
	while (!atomic_load(&ending)) {
		atomic_fetch_add(&spoilt, !fresh_things(self));
		atomic_fetch_add(&spoilt, !old_things(self));
		atomic_fetch_add(&spoilt, !hosted_things(self));
		atomic_fetch_add(&spoilt, !graphs_of_nodes(self));
		look_at_what_is_kept(self);
		pthread_mutex_lock(&lock);
		self->round++;
		pthread_cond_broadcast(&changed);
		pthread_mutex_unlock(&lock);
	}
	end(self);
	return NULL;
}

static void wait_for_rounds(const struct worker *workers)
{
	uint32_t wanted[THREADS];
	struct timespec until;
	int code = 0;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += DEADLINE_S;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < THREADS; i++)
		wanted[i] = workers[i].round + ROUNDS;
	for (int i = 0; i < THREADS && !code; i++)
		while (workers[i].round < wanted[i] && !code)
			code = pthread_cond_timedwait(&changed, &lock, &until);
	pthread_mutex_unlock(&lock);
	must(code ? CUDA_ERROR_TIMEOUT : CUDA_SUCCESS, "rounds");
}

static void start(struct worker *workers, CUcontext context)
{
	for (uint32_t i = 0; i < THREADS; i++) {
		workers[i].number = i + 1;
		workers[i].context = context;
		pthread_create(&workers[i].thread, NULL, work, &workers[i]);
	}
}

int main(int count, char **given)
{
	struct worker workers[THREADS] = { 0 };
	int is_started = count < 3;
	CUcontext context;
	char line[16];

	driver_open(count > 1 ? given[1] : "getproc", "libcuda.so.1");
	MUST(cuInit, 0);
	MUST(cuDevicePrimaryCtxRetain, &context, 0);
	if (is_started)
		start(workers, context);
	while (fgets(line, sizeof(line), stdin)) {
		if (!is_started)
			start(workers, context);
		is_started = 1;
		wait_for_rounds(workers);
		printf("%u %u\n", atomic_load(&spoilt), atomic_load(&told));
		fflush(stdout);
	}
	atomic_store(&ending, 1);
	for (int i = 0; i < THREADS && is_started; i++)
		pthread_join(workers[i].thread, NULL);
	MUST(cuDevicePrimaryCtxRelease, 0);
	puts("ok");
	return 0;
}
