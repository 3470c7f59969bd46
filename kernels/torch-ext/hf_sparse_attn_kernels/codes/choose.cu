// The choice of tokens by their scores, or by the estimates of a group's heads: one launch, for each row and KV head a
// cluster of CLUSTER blocks. Compiled with _cluster.cuh, codes/bits.cuh, _cluster_step.cuh and codes/choice.cuh before
// it and these macros: CLUSTER (1 to 16), THREADS of a block; BLOCKS that a multiprocessor has registers for; GROUP (1
// to 8), the query heads of a group; COLUMNS (4 or 8), the estimates of a token, with those of absent heads; SOFTMAX (0
// or 1): whether there are estimates; FIXED_BYTES, set apart for Shared.

struct Arguments {
  const u16* scores;                                      // float16 [pairs, num_tokens], not for SOFTMAX
  const u16* estimates;                                   // float16 [pairs, num_tokens, COLUMNS], base 2, for SOFTMAX
  const float* scan_lse;                                  // [pairs, scan_blocks, COLUMNS], base 2, for SOFTMAX
  const int *seq_start, *seq_end;
  int* block_indices;                                     // [pairs, max_tokens]
  int* block_counts;                                      // [pairs]
  int kv_heads, num_tokens, max_tokens, sink_tokens, page_size;
  int scan_blocks, tokens_of_scan_block;
};

constexpr int AT_ONCE = SOFTMAX ? 16 / COLUMNS : 4;       // loads of a thread: of two tokens' estimates, or eight scores
constexpr int WORDS = SOFTMAX ? COLUMNS / 4 : 1;          // Words4 of a load
constexpr int EACH = SOFTMAX ? 2 : 8;                     // tokens of a load

struct Shared {
  Choice choice;
  u64 barriers[BARRIERS];
  float lse[GROUP];
};

struct Place {
  int tid, lane, warp;
  int rank, pair;
  int candidates;                                         // tokens of the row before the newest page
  int first_page, pages;                                  // of this block, of PAGE tokens, whatever page_size is
};

// Merge the log-sum-exp of the scan's blocks, a head a warp.
DEVICE void merge_lse(Shared& s, const Arguments& a, const Place& at) {
  const int blocks = (at.candidates + a.tokens_of_scan_block - 1) / a.tokens_of_scan_block;   // that found estimates
  const float* of_pair = a.scan_lse + (long long)at.pair * a.scan_blocks * COLUMNS;
#pragma unroll 1
  for (int h = at.warp; h < GROUP; h += WARPS) {
    MaxSum all{LOW, 0.f};
#pragma unroll 4
    for (int i = at.lane; i < blocks; i += 32) all = merge(all, MaxSum{of_pair[i * COLUMNS + h], 1.f});
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) all = merge(all, MaxSum{shuffle_xor(all.max, mask), shuffle_xor(all.sum, mask)});
    if (at.lane == 0) s.lse[h] = all.max + log2_fast(fmaxf(all.sum, 1e-30f));
  }
}

DEVICE float number(const Words4 (&words)[WORDS], int i) { return half(words[i / 8].x[i / 2 % 4] >> (16 * (i % 2))); }

// Two scores, of which NaN ranks with -inf.
DEVICE u32 without_nan(u32 scores) {
  if ((scores & 0x7FFF) > 0x7C00) scores = (scores & 0xFFFF0000u) | 0xFC00;
  if ((scores >> 16 & 0x7FFF) > 0x7C00) scores = (scores & 0xFFFFu) | 0xFC000000u;
  return scores;
}

// The keys of the tokens of a load, two a word.
DEVICE void find_keys(u32 (&found)[EACH / 2], const Words4 (&words)[WORDS], const float (&lse)[GROUP]) {
  if (SOFTMAX) {
    float score[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float z[GROUP];
#pragma unroll
      for (int h = 0; h < GROUP; h++) z[h] = number(words, i * COLUMNS + h);
      score[i] = log_of_weights(z, lse);
    }
    found[0] = keys_of(without_nan(to_finite_half2(score[0], score[1])));
  } else {
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) found[i] = keys_of(without_nan(words[0].x[i % 4]));
  }
}

// Store the keys of the block's tokens, and count them.
DEVICE void store_keys(Shared& s, const Arguments& a, const Place& at, u16* keys) {
  const int begin = at.first_page * PAGE, sinks = a.sink_tokens - begin, end = at.candidates - begin;
  const long long first_token = (long long)at.pair * a.num_tokens + begin;
  const u8* source = SOFTMAX ? (const u8*)(a.estimates + first_token * COLUMNS) : (const u8*)(a.scores + first_token);
  float lse[GROUP];
#pragma unroll
  for (int h = 0; h < GROUP; h++) lse[h] = SOFTMAX ? s.lse[h] : 0.f;
#pragma unroll 1
  for (int first = EACH * at.tid; first < at.pages * PAGE; first += AT_ONCE * EACH * THREADS) {
    Words4 words[AT_ONCE][WORDS];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int token = first + k * EACH * THREADS;
      const u8* of_token = source + (long long)token * (WORDS * 16 / EACH);
      words[k][0] = load16<0>(of_token, token < end);
      if (WORDS == 2) words[k][WORDS - 1] = load16<16>(of_token, token < end);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int token = first + k * EACH * THREADS;
      if (token >= at.pages * PAGE) break;
      u32 found[EACH / 2];
      find_keys(found, words[k], lse);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const u32 own = i % 2 ? 0xFFFF0000u : 0xFFFFu;
        if (token + i < sinks) found[i / 2] &= ~own;      // FORCED
        if (token + i >= end) found[i / 2] |= own;        // ABSENT
      }
#pragma unroll
      for (int i = 0; i < EACH / 2; i++) *(u32*)&keys[token + 2 * i] = found[i];
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (token + i < end) count_key(s.choice, found[i / 2] >> (16 * (i % 2)) & 0xFFFF);
    }
  }
}

KERNEL(choose_by_score)(const Arguments a) {
  u8* memory = dynamic_shared();
  Shared& s = *(Shared*)memory;
  static_assert(sizeof(Shared) <= FIXED_BYTES, "what follows has a place of its own");
  u16* keys = (u16*)(memory + FIXED_BYTES);
  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.rank = cluster_rank(), at.pair = block_y();
  if (at.tid == 0) {
    for (int i = 0; i < BARRIERS; i++) init_barrier(&s.barriers[i]);
    publish_barriers();
  }
  sync_warp();
  arrive_cluster();
  clear_counts(s.choice, at);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int row = at.pair / a.kv_heads, length = min(max(a.seq_end[row] - a.seq_start[row], 0), a.num_tokens);
  at.candidates = max(length - 1, 0) / a.page_size * a.page_size;
  const int pages = (at.candidates + PAGE - 1) / PAGE, each = (pages + CLUSTER - 1) / CLUSTER;
  at.first_page = min(at.rank * each, pages), at.pages = min(each, pages - at.first_page);
  if (SOFTMAX) merge_lse(s, a, at);
  sync_block();
  store_keys(s, a, at, keys);
  wait_cluster();                                         // all blocks run, and their barriers exist
  const int newest = length - at.candidates, count = min(length, a.max_tokens), need = max(count - newest, 0);
  int* indices = a.block_indices + (long long)at.pair * a.max_tokens;
  Among among;
  const Last last = find_last(s.choice, at, keys, need, s.barriers, among);
  emit_chosen(s.choice, at, among, last, [=](int n, int place) { indices[n] = at.first_page * PAGE + place; });
  if (at.rank > 0) return;
  for (int i = need + at.tid; i < count; i += THREADS) indices[i] = at.candidates + i - need;
  write_absent(a, at, count);
  if (at.tid == 0) a.block_counts[at.pair] = count;
}
