// SPDX-License-Identifier: MIT
/*
 * Each thread's own default stream (CU_STREAM_PER_THREAD): a stream of this library's, which waits for the legacy one and
 * is waited for by it as the driver's would, and goes on in the next copy as any other. It ends with its thread.
 */
#include <pthread.h>

#include "failover/carry.h"
#include "failover/line.h"

#define MOST 4		/* contexts in which one thread works */

struct own {
	CUcontext context;
	CUstream stream;
	unsigned int contexts;	/* that had ended by then */
};

static atomic_uint ended;

static _Thread_local struct own own[MOST] __attribute__((tls_model("initial-exec")));
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool has_key;

/* As the program would call it. */
#define CALL(function, ...) ((__typeof__(&function))mpsd_table[MPSD_##function])(__VA_ARGS__)

static void end(void *streams)
{
	struct own *mine = streams;

	for (int i = 0; i < MOST && mine[i].stream; i++) {
		if (mine[i].contexts == atomic_load(&ended))
			CALL(cuStreamDestroy_v2, mine[i].stream);
		mine[i] = (struct own){ NULL, NULL, 0 };
	}
}

static void make_key(void)
{
	has_key = !pthread_key_create(&key, end);
}

static CUstream made(struct own *mine, CUcontext context)
{
	CUstream stream;

	pthread_once(&once, make_key);
	if (CALL(cuStreamCreate, &stream, CU_STREAM_DEFAULT) != CUDA_SUCCESS)
		return CU_STREAM_PER_THREAD;
	if (has_key)
		pthread_setspecific(key, own);
	*mine = (struct own){ context, stream, atomic_load(&ended) };
	return stream;
}

/* The handle of a context may come again. */
static void forget_ended(void)
{
	for (int i = 0; i < MOST; i++)
		if (own[i].contexts != atomic_load(&ended))
			own[i] = (struct own){ NULL, NULL, 0 };
}

void mpsd_own_context_ended(void)
{
	atomic_fetch_add(&ended, 1);
}

CUstream mpsd_own_stream(void)
{
	CUcontext context = NULL;
	int i = 0;

	/* The driver says what is wrong. */
	if (mpsd_is_forbidden() || CALL(cuCtxGetCurrent, &context) != CUDA_SUCCESS || !context)
		return CU_STREAM_PER_THREAD;
	forget_ended();
	while (i < MOST && own[i].stream && own[i].context != context)
		i++;
	if (i < MOST)
		return own[i].stream ? own[i].stream : made(&own[i], context);
	mpsd_line_opaque("CU_STREAM_PER_THREAD in too many contexts");
	return CU_STREAM_PER_THREAD;
}

/* In a forked child the driver does not work. */
void mpsd_own_child(void)
{
	for (int i = 0; i < MOST; i++)
		own[i] = (struct own){ NULL, NULL, 0 };
}
