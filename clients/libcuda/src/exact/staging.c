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
#define MAPPED (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)

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

/* Where the bytes are, and where they are to be. */
struct area {
	CUdeviceptr from;
	char *to;
	size_t width, height, depth;
	size_t from_pitch, from_plane, to_pitch, to_plane;
};

static CUresult submit(struct mpsd_op *op)
{
	CUresult result = mpsd_submit_new(op, true);

	/* Where the mode has ended nothing is proven. */
	if (result == CUDA_SUCCESS && !mpsd_exact())
		result = inner_cuStreamSynchronize(mpsd_native(op->stream));
	return result;
}

static CUresult copy(void *to, CUdeviceptr from, size_t size, CUstream stream, bool is_staged)
{
	struct mpsd_op op = {
		.kind = MPSD_OP_COPY,
		.stream = stream,
		.copy = { .way = MPSD_COPY_OUT, .to = (CUdeviceptr)to, .from = from, .size = size,
			  .is_for_host = true, .is_staged = is_staged },
	};

	return submit(&op);
}

/* One behind the other in the pages. */
static CUresult copy_rows(void *to, CUdeviceptr from, size_t pitch, size_t width, size_t count, CUstream stream)
{
	const struct mpsd_rows rows = {
		.given = {
			.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = from, .srcPitch = pitch,
			.dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = to, .dstPitch = width,
			.WidthInBytes = width, .Height = count, .Depth = 1,
		},
		.to_pitch = width,
		.from_pitch = pitch,
	};
	struct mpsd_op op = {
		.kind = MPSD_OP_COPY,
		.stream = stream,
		.copy = { .way = MPSD_COPY_OUT, .to = (CUdeviceptr)to, .from = from, .size = count * width,
			  .is_for_host = true, .is_staged = true, .rows = &rows },
	};

	return submit(&op);
}

static size_t least(size_t one, size_t two)
{
	return one < two ? one : two;
}

/* As many rows as there is room for, or a part of one. */
static CUresult copy_piece(char *pages, char *to, CUdeviceptr from, size_t width, size_t count,
			   const struct area *area, CUstream stream)
{
	CUresult result;

	mpsd_thread.noted_in = 0;
	result = count == 1 ? copy(pages, from, width, stream, true)
			    : copy_rows(pages, from, area->from_pitch, width, count, stream);
	for (size_t row = 0; row < count && result == CUDA_SUCCESS; row++)
		memcpy(to + row * area->to_pitch, pages + row * width, width);
	return result;
}

static CUresult copy_plane(char *pages, const struct area *area, size_t plane, CUstream stream)
{
	size_t most = area->width < BYTES ? BYTES / area->width : 1;
	CUresult result = CUDA_SUCCESS;

	for (size_t row = 0, count; row < area->height && result == CUDA_SUCCESS; row += count) {
		char *to = area->to + plane * area->to_plane + row * area->to_pitch;
		CUdeviceptr from = area->from + plane * area->from_plane + row * area->from_pitch;

		count = least(area->height - row, most);
		for (size_t at = 0; at < area->width && result == CUDA_SUCCESS; at += BYTES)
			result = copy_piece(pages, to + at, from + at, least(area->width - at, BYTES), count, area,
					    stream);
	}
	return result;
}

static CUresult copy_through(void **pages, const struct area *area, CUstream stream)
{
	void *there = *pages;
	CUresult result = there ? CUDA_SUCCESS : make_cuMemHostAlloc(&there, BYTES, MAPPED);

	/* What a move has overtaken is the copy's that is left. */
	if (result == CUDA_SUCCESS && !*pages) {
		*pages = there;
		mpsd_pins_forget(there);
	}
	for (size_t plane = 0; plane < area->depth && result == CUDA_SUCCESS; plane++)
		result = copy_plane(*pages, area, plane, stream);
	mpsd_thread.noted_in = 0;
	return result;
}

static CUresult stage(const struct area *area, CUstream stream)
{
	struct buffer *buffer = take();
	CUresult result;

	result = copy_through(&buffer->pages[mpsd_tables()->moves / 2 % GENERATIONS], area, stream);
	pthread_mutex_unlock(&buffer->lock);
	return result;
}

CUresult mpsd_stage_out(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
	const struct area area = { .from = from, .to = to, .width = size, .height = 1, .depth = 1 };

	return mpsd_is_pinned(to) ? copy(to, from, size, stream, false) : stage(&area, stream);
}

CUresult mpsd_stage_rows_out(const struct mpsd_op *given)
{
	const struct mpsd_rows *rows = given->copy.rows;
	const struct area area = {
		.from = given->copy.from, .to = (char *)given->copy.to, .width = rows->given.WidthInBytes,
		.height = rows->given.Height, .depth = rows->given.Depth, .from_pitch = rows->from_pitch,
		.from_plane = rows->from_plane, .to_pitch = rows->to_pitch, .to_plane = rows->to_plane,
	};
	struct mpsd_op op = *given;

	op.waits = false;
	return mpsd_is_pinned(area.to) ? submit(&op) : stage(&area, given->stream);
}

void mpsd_stage_child(void)
{
	for (unsigned int i = 0; i < BUFFERS; i++)
		buffers[i].lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
