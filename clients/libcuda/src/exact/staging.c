// SPDX-License-Identifier: MIT
/*
 * Copies to pageable memory of the host, by way of pinned pages. The driver's own way keeps the thread until the GPU
 * has copied, and longer where the context is lost meanwhile.
 *
 * A move does none of it again: whoever it overtakes begins anew in the next copy, with other pages, for the one that
 * was left may write into these for a while.
 */
#include <string.h>

#include "exact/state.h"

#define BUFFERS 8
#define BYTES ((size_t)4 << 20)
#define GENERATIONS 4		/* of pages, each with a copy of the driver */

CUresult make_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags);

static struct buffer {
	pthread_mutex_t lock;	/* of who copies through it */
	void *pages[GENERATIONS];
} buffers[BUFFERS] = {
	{ PTHREAD_MUTEX_INITIALIZER, { NULL } }, { PTHREAD_MUTEX_INITIALIZER, { NULL } },
	{ PTHREAD_MUTEX_INITIALIZER, { NULL } }, { PTHREAD_MUTEX_INITIALIZER, { NULL } },
	{ PTHREAD_MUTEX_INITIALIZER, { NULL } }, { PTHREAD_MUTEX_INITIALIZER, { NULL } },
	{ PTHREAD_MUTEX_INITIALIZER, { NULL } }, { PTHREAD_MUTEX_INITIALIZER, { NULL } },
};

static struct buffer *take(void)
{
	for (unsigned int i = 0; i < BUFFERS; i++)
		if (!pthread_mutex_trylock(&buffers[i].lock))
			return &buffers[i];
	pthread_mutex_lock(&buffers[0].lock);
	return &buffers[0];
}

static CUresult copy(void *to, CUdeviceptr from, size_t size, CUstream stream, bool is_staged)
{
	const struct mpsd_op op = {
		.kind = MPSD_OP_COPY,
		.stream = stream,
		.copy = { .way = MPSD_COPY_OUT, .to = (CUdeviceptr)to, .from = from, .size = size,
			  .is_for_host = true, .is_staged = is_staged },
	};
	CUresult result = mpsd_submit_new(&op, true);

	/* Where the mode has ended nothing is proven. */
	if (result == CUDA_SUCCESS && !mpsd_exact())
		result = inner_cuStreamSynchronize(mpsd_native(stream));
	return result;
}

static CUresult copy_through(void **pages, void *to, CUdeviceptr from, size_t size, CUstream stream)
{
	CUresult result = CUDA_SUCCESS;

	if (!*pages) {
		result = make_cuMemHostAlloc(pages, BYTES, CU_MEMHOSTALLOC_PORTABLE);
		mpsd_pins_forget(*pages);
	}
	for (size_t done = 0; result == CUDA_SUCCESS && done < size; done += BYTES) {
		size_t piece = size - done < BYTES ? size - done : BYTES;

		mpsd_noted_in = 0;
		result = copy(*pages, from + done, piece, stream, true);
		if (result == CUDA_SUCCESS)
			memcpy((char *)to + done, *pages, piece);
	}
	mpsd_noted_in = 0;
	return result;
}

CUresult mpsd_stage_out(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
	struct buffer *buffer;
	CUresult result;

	if (mpsd_is_pinned(to))
		return copy(to, from, size, stream, false);
	buffer = take();
	result = copy_through(&buffer->pages[mpsd_tables()->moves / 2 % GENERATIONS], to, from, size, stream);
	pthread_mutex_unlock(&buffer->lock);
	return result;
}

void mpsd_stage_child(void)
{
	for (unsigned int i = 0; i < BUFFERS; i++)
		buffers[i].lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
