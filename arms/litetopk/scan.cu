// The fused LiteTopk scan for SM90: fp8 scores of a block of query rows against all of their keys, gated in registers; only keys
// at or above their row's threshold leave the loop. No logits are written. cuda_library.py builds this file, scan_cuda.py calls it.
//
// One persistent CTA an SM, 4 math warpgroups and a producer. A unit of work is a block of 256 / H query rows (8 at H=32) and a
// split of its keys. Warpgroup w scores the 128 (row, head) pairs of half w % 2 of the block against keys w / 2 * 128 .. + 128 of
// every 256-key tile, so a tile is read from L2 once for the whole block. D = K (64 keys, rows of the MMA) x Q^T (128 columns):
// a thread then holds whole heads of two keys, and the sum over heads is an in-thread FMA chain and three or six shuffles.
//
// K and Q arrive in the 128-byte-swizzled layout that wgmma reads, laid out so in global memory by `swizzle`, so that a tile is
// one linear bulk copy and no tensor map is needed.
#include <cuda_runtime.h>
#include <cstdint>

namespace {

constexpr int kTile = 256, kStages = 4, kRowBytes = 128, kMath = 512, kThreads = kMath + 128;
constexpr int kHalfBytes = 128 * kRowBytes, kQBytes = 2 * kHalfBytes, kTileBytes = kTile * kRowBytes, kScaleBytes = kTile * 4;

struct Args {
  const uint8_t *k, *q;         // swizzled: [tiles * 256, 128], [blocks * 256, 128]
  const float *scale, *weight;  // [tiles * 256], [num_q, H]
  const int *ks, *ke;           // [num_q]
  const float *threshold;       // [num_q]: a key passes iff score >= threshold; NaN lets nothing pass
  uint64_t *candidate;          // [num_q, capacity + ties], score bits << 32 | key: above the threshold, then equal to it
  int *count;                   // [num_q, 2]: keys above and equal, also those that found no room
  float *score;                 // instead of candidates: all scores, [num_q, columns]
  long long columns;
  int num_q, tiles, splits, capacity, ties;
};

// What becomes of a score: a candidate, counted in shared memory by the one CTA that has the row, or in global memory where the row's keys
// are split over CTAs; or (kStore) every score is written.
enum Mode { kShared, kGlobal, kStore };

struct Shared {
  alignas(1024) uint8_t q[kQBytes];
  alignas(1024) uint8_t k[kStages][kTileBytes];
  alignas(128) float scale[kStages][kTile];
  alignas(8) uint64_t full[kStages], empty[kStages], q_full, q_empty;
  int tile[kStages];  // number * 4, + 2 for the last of a unit, + 1 where some row's window does not cover it
  int count[kTile / 32][2];  // of the block's rows, 8 at most: above the threshold, equal to it
};

__device__ uint32_t address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void barrier_init(uint64_t *b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(arrivals));
}

__device__ void barrier_arrive(uint64_t *b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory");
}

__device__ void barrier_expect(uint64_t *b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)), "r"(bytes) : "memory");
}

__device__ void barrier_wait(uint64_t *b, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(address(b)),
      "r"(parity)
      : "memory");
}

__device__ void bulk_copy(void *to, const void *from, int bytes, uint64_t *b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)), "l"(from),
               "r"(bytes), "r"(address(b))
               : "memory");
}

// Descriptor of a K-major operand, rows of 128 bytes, 128-byte swizzle: groups of 8 rows lie 1024 bytes apart.
__device__ uint64_t descriptor(uint32_t shared_address) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16) | (shared_address >> 4);
}

__device__ void keep(float (&d)[64]) {  // the compiler must not read d before the wait that precedes this
#pragma unroll
  for (int i = 0; i < 64; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ void mma(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
      "%27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "
      "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
        "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(accumulate));
}

// What all threads agree on about a unit: its rows and its tiles. inner: tiles wholly inside every row's window.
struct Unit {
  int row, split, begin, end, inner_begin, inner_end;
};

template <int H>
__device__ Unit unit_of(const Args &a, int number, int blocks) {
  constexpr int kRows = kTile / H;
  Unit u;
  u.split = number / blocks;
  u.row = number % blocks * kRows;
  int low = INT_MAX, high = 0, latest = 0, earliest = INT_MAX;
  for (int i = 0; i < kRows && u.row + i < a.num_q; i++) {
    int from = a.ks[u.row + i], to = a.ke[u.row + i];
    latest = max(latest, from), earliest = min(earliest, to);
    if (to > from) low = min(low, from), high = max(high, to);
  }
  int first = high ? low / kTile : 0, last = min(a.tiles, (high + kTile - 1) / kTile);
  int share = (last - first + a.splits - 1) / a.splits;
  u.begin = min(last, first + u.split * share);
  u.end = min(last, u.begin + share);
  u.inner_begin = (latest + kTile - 1) / kTile;
  u.inner_end = earliest / kTile;
  return u;
}

template <int H>
__device__ void produce(const Args &a, Shared &s, int units, int blocks) {
  int stage = 0, phase = 0, q_phase = 0;
  for (int number = blockIdx.x; number < units; number += gridDim.x) {
    Unit u = unit_of<H>(a, number, blocks);
    if (u.begin >= u.end) continue;
    barrier_wait(&s.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    barrier_expect(&s.q_full, kQBytes);
    bulk_copy(s.q, a.q + size_t(u.row) * H * kRowBytes, kQBytes, &s.q_full);
    for (int tile = u.begin; tile < u.end; tile++) {
      barrier_wait(&s.empty[stage], phase ^ 1);
      s.tile[stage] = tile * 4 + (tile + 1 == u.end) * 2 + (tile < u.inner_begin || tile >= u.inner_end);
      barrier_expect(&s.full[stage], kTileBytes + kScaleBytes);
      bulk_copy(s.k[stage], a.k + size_t(tile) * kTileBytes, kTileBytes, &s.full[stage]);
      bulk_copy(s.scale[stage], a.scale + size_t(tile) * kTile, kScaleBytes, &s.full[stage]);
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  }
}

// Half of the ReLUs are done by the FMA pipe, as a product that saturates to [0, 1], to spare the ALU pipe, where max runs at half
// the rate. No dot product reaches 2^25 (448 * 448 * 128), and scaling by a power of two, undone in the weight, rounds nothing (a weight of
// 2^103 or more overflows there).
__device__ bool by_saturation(int i) { return i % 2 == 0; }
__device__ float relu(float x, int i) { return by_saturation(i) ? __saturatef(x * 0x1p-25f) : fmaxf(x, 0.f); }

// Sum over heads. d: one warpgroup's 64 keys x 128 (row, head) pairs; w: this thread's 32 weights, in the order of its columns.
// H=32: lane & 3 is the row, result[0] and [1] are keys lane / 4 and lane / 4 + 8. H=64: lane >> 1 & 1 is the row, lane & 1 the key.
template <int H>
__device__ void head_sum(const float (&d)[64], const float (&w)[32], int lane, float (&result)[H == 32 ? 2 : 1]) {
  constexpr int kRows = 128 / H, kGroups = H / 8;  // groups of 8 columns a row
  float part[kRows][2];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    float x0 = 0, x1 = 0;
#pragma unroll
    for (int g = r * kGroups; g < (r + 1) * kGroups; g++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        x0 = fmaf(relu(d[g * 4 + i], i), w[g * 2 + i], x0);
        x1 = fmaf(relu(d[g * 4 + 2 + i], i), w[g * 2 + i], x1);
      }
    }
    part[r][0] = x0, part[r][1] = x1;
  }
  bool upper = lane & 2, odd = lane & 1;
  if constexpr (H == 32) {
    float two[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        float mine = upper ? part[i + 2][m] : part[i][m], other = upper ? part[i][m] : part[i + 2][m];
        two[i][m] = mine + __shfl_xor_sync(~0u, other, 2);
      }
#pragma unroll
    for (int m = 0; m < 2; m++) {
      float mine = odd ? two[1][m] : two[0][m], other = odd ? two[0][m] : two[1][m];
      result[m] = mine + __shfl_xor_sync(~0u, other, 1);
    }
  } else {
    float one[2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      float mine = upper ? part[1][m] : part[0][m], other = upper ? part[0][m] : part[1][m];
      one[m] = mine + __shfl_xor_sync(~0u, other, 2);
    }
    float mine = odd ? one[1] : one[0], other = odd ? one[0] : one[1];
    result[0] = mine + __shfl_xor_sync(~0u, other, 1);
  }
}

// Count a key that passed, and keep it where there is room. Addresses are made here: the loop has no registers to spare for them.
template <Mode kMode>
__device__ void emit(const Args &a, Shared &s, int row, int local, float value, float threshold, int position) {
  const bool tie = value == threshold;
  const int slot = atomicAdd(kMode == kGlobal ? a.count + size_t(row) * 2 + tie : &s.count[local][tie], 1);
  if (slot < (tie ? a.ties : a.capacity))
    a.candidate[size_t(row) * (a.capacity + a.ties) + (tie ? a.capacity : 0) + slot] =
        uint64_t(__float_as_uint(value)) << 32 | uint32_t(position);
}

template <int H, Mode kMode>
__device__ void consume(const Args &a, Shared &s, int units, int blocks) {
  constexpr int kRows = 128 / H, kKeys = H == 32 ? 2 : 1;  // rows a warpgroup, keys a thread and 64-key step
  // The shuffle tells the compiler that it is the same in all lanes: descriptors then live in uniform registers.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32, half = group % 2;
  const int local = H == 32 ? lane & 3 : lane >> 1 & 1;  // this thread's row of the warpgroup's
  const int key = group / 2 * 128 + threadIdx.x % 128 / 32 * 16 + lane / 4 + (H == 32 ? 0 : (lane & 1) * 8);
  const uint32_t q_address = address(s.q + half * kHalfBytes);
  int stage = 0, phase = 0, q_phase = 0;
  for (int number = blockIdx.x; number < units; number += gridDim.x) {
    const Unit u = unit_of<H>(a, number, blocks);
    const int first_row = u.row + half * kRows, row = first_row + local;
    const bool real = row < a.num_q;
    const float threshold = real && kMode != kStore ? a.threshold[row] : NAN;
    float w[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
      int column = i / 2 * 8 + (lane & 3) * 2 + i % 2, r = first_row + column / H;
      w[i] = r < a.num_q ? a.weight[size_t(r) * H + column % H] * (by_saturation(i) ? 0x1p25f : 1.f) : 0.f;
    }
    const bool any = u.begin < u.end;
    if (any) {
      barrier_wait(&s.q_full, q_phase);
      q_phase ^= 1;
    }
    for (bool more = any; more;) {
      barrier_wait(&s.full[stage], phase);
      const int tile = s.tile[stage];
      more = !(tile & 2);
#pragma unroll
      for (int step = 0; step < 2; step++) {
        float d[64], scale[kKeys], score[kKeys];
        const uint32_t k_address = address(s.k[stage] + (group / 2 * 128 + step * 64) * kRowBytes);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) mma(d, descriptor(k_address + i * 32), descriptor(q_address + i * 32), i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#pragma unroll
        for (int m = 0; m < kKeys; m++) scale[m] = s.scale[stage][key + step * 64 + m * 8];
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        keep(d);
        if (step == 1 && threadIdx.x % 32 == 0) barrier_arrive(&s.empty[stage]);
        head_sum<H>(d, w, lane, score);
#pragma unroll
        for (int m = 0; m < kKeys; m++) {
          const float value = score[m] * scale[m];
          const int position = tile / 4 * kTile + key + step * 64 + m * 8;
          if constexpr (kMode == kStore) {
            if (real) a.score[row * a.columns + position] = value;
          } else if (value >= threshold && (!(tile & 1) || (position >= a.ks[row] && position < a.ke[row]))) {
            emit<kMode>(a, s, row, half * kRows + local, value, threshold, position);
          }
        }
      }
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
    if (any && threadIdx.x % 32 == 0) barrier_arrive(&s.q_empty);
    if constexpr (kMode == kShared) {
      asm volatile("bar.sync 1, %0;" ::"n"(kMath) : "memory");
      if (threadIdx.x < kTile / H * 2) {
        int *mine = &s.count[0][0] + threadIdx.x;
        if (u.row + threadIdx.x / 2 < a.num_q) a.count[size_t(u.row) * 2 + threadIdx.x] = *mine;
        *mine = 0;
      }
      asm volatile("bar.sync 1, %0;" ::"n"(kMath) : "memory");
    }
  }
}

template <int H, Mode kMode>
__global__ void __launch_bounds__(kThreads, 1) scan(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared &s = *reinterpret_cast<Shared *>(raw);
  if (address(raw) % 1024) __trap();  // the swizzle is one of addresses
  const int blocks = (a.num_q + kTile / H - 1) / (kTile / H), units = blocks * a.splits;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], kMath / 32);
    barrier_init(&s.q_full, 1), barrier_init(&s.q_empty, kMath / 32);
    for (int i = 0; i < kTile / 32; i++) s.count[i][0] = s.count[i][1] = 0;
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kMath) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == kMath) produce<H>(a, s, units, blocks);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    consume<H, kMode>(a, s, units, blocks);
  }
}

__global__ void swizzle_rows(const uint4 *from, uint4 *to, long long rows, long long padded) {
  for (long long i = blockIdx.x * 256LL + threadIdx.x; i < padded * 8; i += gridDim.x * 256LL) {
    const long long row = i / 8, chunk = i % 8;
    to[row * 8 + (chunk ^ (row & 7))] = row < rows ? from[i] : make_uint4(0, 0, 0, 0);
  }
}

template <int H, Mode kMode>
int run(const Args &a, int sms, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared);
  cudaError_t error = cudaFuncSetAttribute(scan<H, kMode>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int units = (a.num_q + kTile / H - 1) / (kTile / H) * a.splits;
  scan<H, kMode><<<min(sms, units), kThreads, bytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

extern "C" {

// e4m3 [rows, 128] -> [padded, 128] with the 16-byte pieces of a row in the order of the 128-byte swizzle; rows past the end are 0.
int swizzle(const void *from, void *to, long long rows, long long padded, cudaStream_t stream) {
  swizzle_rows<<<int(min(4096LL, (padded * 8 + 255) / 256)), 256, 0, stream>>>(static_cast<const uint4 *>(from),
                                                                               static_cast<uint4 *>(to), rows, padded);
  return cudaGetLastError();
}

// Scan a problem. score != null: write all scores instead of candidates. splits > 1: count must be 0. Returns a cudaError_t.
int scan_keys(const uint8_t *k, const float *scale, const uint8_t *q, const float *weight, const int *ks, const int *ke,
              const float *threshold, uint64_t *candidate, int *count, float *score, long long columns, int heads, int num_q, int tiles,
              int splits, int capacity, int ties, int sms, cudaStream_t stream) {
  const Args a{k, q, scale, weight, ks, ke, threshold, candidate, count, score, columns, num_q, tiles, splits, capacity, ties};
  if (heads == 32) return score ? run<32, kStore>(a, sms, stream) : splits > 1 ? run<32, kGlobal>(a, sms, stream) : run<32, kShared>(a, sms, stream);
  if (heads == 64) return score ? run<64, kStore>(a, sms, stream) : splits > 1 ? run<64, kGlobal>(a, sms, stream) : run<64, kShared>(a, sms, stream);
  return cudaErrorInvalidValue;
}
}
