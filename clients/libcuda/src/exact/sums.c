// SPDX-License-Identifier: MIT
/*
 * All is made before the first sum, as the program's things are, so that the standby has it too: while the resource
 * manager is at a fault it makes nothing.
 */
#include "exact/sums.h"

#include "exact/pages.h"
#include "exact/saver.h"
#include "failover/graph.h"
#include "memory.h"

#define THREADS 256
#define RANGES 22u

/* What the kernel is given. */
struct compared {
	CUdeviceptr kept, fresh, differs;
	struct mpsd_pages ranges[RANGES];
};

_Static_assert(sizeof(struct compared) == 376, "the kernel has that in its code");

/* mpsd_sums_differ(compared): for each block a range of sums; one word is set where any two are not the same. */
static const char code[] =
	".version 6.0\n"
	".target sm_70\n"
	".address_size 64\n"
	".visible .entry mpsd_sums_differ(.param .align 8 .b8 compared[376])\n"
	"{\n"
	"	.reg .pred %is;\n"
	"	.reg .b32 %block, %thread, %threads, %one;\n"
	"	.reg .b64 %list, %at, %kept, %fresh, %differs, %first, %end, %step, %a, %b, %x, %y;\n"
	"	mov.u32 %block, %ctaid.x;\n"
	"	mul.wide.u32 %at, %block, 16;\n"
	"	mov.u64 %list, compared;\n"
	"	ld.param.u64 %kept, [%list];\n"
	"	ld.param.u64 %fresh, [%list+8];\n"
	"	ld.param.u64 %differs, [%list+16];\n"
	"	add.u64 %list, %list, %at;\n"
	"	ld.param.u64 %first, [%list+24];\n"
	"	ld.param.u64 %end, [%list+32];\n"
	"	mov.u32 %thread, %tid.x;\n"
	"	mov.u32 %threads, %ntid.x;\n"
	"	cvt.u64.u32 %at, %thread;\n"
	"	cvt.u64.u32 %step, %threads;\n"
	"	add.u64 %first, %first, %at;\n"
	"	mov.u32 %one, 1;\n"
	"again:\n"
	"	setp.ge.u64 %is, %first, %end;\n"
	"	@%is bra out;\n"
	"	shl.b64 %at, %first, 3;\n"
	"	add.u64 %a, %kept, %at;\n"
	"	add.u64 %b, %fresh, %at;\n"
	"	ld.global.u64 %x, [%a];\n"
	"	ld.global.u64 %y, [%b];\n"
	"	add.u64 %first, %first, %step;\n"
	"	setp.eq.u64 %is, %x, %y;\n"
	"	@%is bra again;\n"
	"	st.global.u32 [%differs], %one;\n"
	"	bra again;\n"
	"out:\n"
	"	ret;\n"
	"}\n";

/* With the order; what a move has overtaken is not noted. */
static struct {
	bool is_refused, is_there;
	CUfunction sums, differ;
	CUdeviceptr kept, fresh;	/* a sum for each page of the window */
	uint32_t *differs;		/* pinned */
} own;

CUresult make_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags);
CUresult make_cuMemFreeHost(void *p);

/* In the window it is memory for any copy; whoever comes second has made it in vain. */
static CUresult make_sums(CUdeviceptr *sums)
{
	CUdeviceptr fresh;
	CUresult result;

	if (*sums)
		return CUDA_SUCCESS;
	result = mpsd_memory_alloc_inside(&fresh, mpsd_stamps_count() * sizeof(uint64_t), MPSD_INSIDE_ONLY);
	if (result != CUDA_SUCCESS)
		return result;
	mpsd_word_take(&mpsd_exact_lock);
	if (!*sums) {
		*sums = fresh;
		fresh = 0;
	}
	mpsd_word_give(&mpsd_exact_lock);
	if (fresh)
		inner_cuMemFree_v2(fresh);
	return CUDA_SUCCESS;
}

static CUresult make_word(void)
{
	void *page = NULL;
	CUresult result;

	if (own.differs)
		return CUDA_SUCCESS;
	result = make_cuMemHostAlloc(&page, sizeof(*own.differs), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
	if (result != CUDA_SUCCESS)
		return result;
	mpsd_word_take(&mpsd_exact_lock);
	if (!own.differs) {
		own.differs = page;
		page = NULL;
	}
	mpsd_word_give(&mpsd_exact_lock);
	if (page)
		make_cuMemFreeHost(page);
	else
		mpsd_pins_forget(own.differs);
	return CUDA_SUCCESS;
}

static void drop(CUdeviceptr *sums)
{
	if (*sums)
		inner_cuMemFree_v2(*sums);
	*sums = 0;
}

bool mpsd_sums_may(void)
{
	return own.is_there || (!own.is_refused && !mpsd_capturing());
}

static CUresult make(void)
{
	CUresult result;

	if (own.is_there)
		return CUDA_SUCCESS;
	/* While something is captured nothing is made. */
	if (!mpsd_sums_may())
		return CUDA_ERROR_NOT_SUPPORTED;
	result = mpsd_own_kernel(&own.sums, mpsd_pages_code, "mpsd_page_sums");
	if (result == CUDA_SUCCESS)
		result = mpsd_own_kernel(&own.differ, code, "mpsd_sums_differ");
	if (result == CUDA_SUCCESS)
		result = make_sums(&own.kept);
	if (result == CUDA_SUCCESS)
		result = make_sums(&own.fresh);
	if (result == CUDA_SUCCESS)
		result = make_word();
	if (result == MPSD_AGAIN || mpsd_is_loss(result))
		return result;
	own.is_there = result == CUDA_SUCCESS;
	own.is_refused = !own.is_there;
	if (own.is_there)
		return CUDA_SUCCESS;
	drop(&own.kept);
	drop(&own.fresh);
	return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult add_up(struct mpsd_pages pages, CUdeviceptr sums, CUstream stream)
{
	CUdeviceptr base = mpsd_stamps_address(pages.first), to = sums + pages.first * sizeof(uint64_t);
	size_t count = pages.end - pages.first;
	CUresult result = real_cuMemsetD32Async(to, 0, count * 2, stream);

	return result == CUDA_SUCCESS ? mpsd_pages_add_up(mpsd_native(own.sums), base, count, to, stream) : result;
}

CUresult mpsd_sums_take(const struct mpsd_pages *pages, unsigned int count, CUstream stream)
{
	CUresult result = make();

	for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = add_up(pages[i], own.kept, stream);
	return result;
}

static CUresult compare(const struct mpsd_pages *pages, unsigned int count)
{
	struct compared compared = { own.kept, own.fresh, (CUdeviceptr)own.differs, { { 0 } } };
	void *parameters[] = { &compared };

	for (unsigned int i = 0; i < count; i++)
		compared.ranges[i] = pages[i];
	return real_cuLaunchKernel(mpsd_native(own.differ), count, 1, 1, THREADS, 1, 1, 0, CU_STREAM_LEGACY, parameters,
				   NULL);
}

CUresult mpsd_sums_compare(const struct mpsd_pages *pages, unsigned int count)
{
	CUresult result = CUDA_SUCCESS;

	__atomic_store_n(own.differs, 0, __ATOMIC_RELEASE);
	for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = add_up(pages[i], own.fresh, CU_STREAM_LEGACY);
	for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i += RANGES)
		result = compare(pages + i, count - i < RANGES ? count - i : RANGES);
	return result;
}

bool mpsd_sums_differ(void)
{
	return __atomic_load_n(own.differs, __ATOMIC_ACQUIRE) != 0;
}
