// The choice among the few tokens that keep.cu has left of a row and KV head: a block for each. Compiled with the same files
// and macros, and: ROOM, tokens that the block holds; AHEAD, those that a thread loads at once.
//
// If the lists lack tokens that may be chosen, or hold too many, the block looks through all tokens of the row, and writes
// their keys to memory: that takes many times as long, and is rare.

struct Arguments {
  const u16* scores;                                      // float16 [pairs, num_tokens], not for SOFTMAX
  const u16* estimates;                                   // float16 [pairs, num_tokens, COLUMNS], base 2, for SOFTMAX
  const float* scan_lse;                                  // [pairs, scan_blocks, COLUMNS], base 2, for SOFTMAX
  const int *seq_start, *seq_end;
  const u32* kept;                                        // [pairs, lists, MOST_KEPT], as keep.cu writes them, like the next
  const int* kept_counts;                                 // [pairs, lists + 1], at most 32 lists
  u16* keys;                                              // [pairs, num_tokens]
  int* block_indices;                                     // [pairs, max_tokens]
  int* block_counts;                                      // [pairs]
  int kv_heads, num_tokens, max_tokens, sink_tokens, page_size;
  int scan_blocks, tokens_of_scan_block;
  int lists, span;
};

constexpr int KEYS = 2048;                                // the last ones up to the limit, which have a bin each

struct Shared {
  u32 tokens[ROOM];                                       // of the lists, and
  u16 keys[ROOM];
  u32 bins[KEYS], lower_bins[KEYS / 64];
  int warp_total[WARPS], warp_less[WARPS], warp_equal[WARPS], edge, above, level;
  float lse[GROUP];
};

struct Place {
  int tid, lane, warp;
  int pair;
  int candidates;                                         // tokens of the row before the newest page
  int pages, sinks, end;                                  // pages of PAGE tokens; the tokens before these are sinks, and exist
};

// How many tokens the lists have, or -1 if one lacks some; and up to a lane's list.
DEVICE int count_kept(const Arguments& a, const Place& at, int& until) {
  const int count = at.lane < a.lists ? a.kept_counts[(long long)at.pair * (a.lists + 1) + at.lane] : 0;
  until = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = shuffle_up(until, distance);
    if (at.lane >= distance) until += other;
  }
  return warp_ballot(count < 0) ? -1 : shuffle(until, 31);
}

// Load the `total` tokens of the lists, and count their keys, in bins from `first_key` on.
DEVICE void load_kept(Shared& s, const Arguments& a, const Place& at, int until, int total, int first_key) {
  const u32* of_pair = a.kept + (long long)at.pair * a.lists * MOST_KEPT;
#pragma unroll 1
  for (int begin = at.warp * 32; begin < total; begin += AHEAD * THREADS) {
    u32 entries[AHEAD];
    int lists[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int first = begin + k * THREADS, i = first + at.lane;
      int list = count_bits(warp_ballot(until <= first)), before = shuffle(until, max(list - 1, 0));
      const int last = min(count_bits(warp_ballot(until <= first + 31)), 31);
#pragma unroll 1
      for (int next = list; next < last; next++) {        // few of them end among these tokens
        const int end = shuffle(until, next);
        if (end <= i) list = next + 1, before = end;
      }
      load4(entries[k], of_pair + (long long)list * MOST_KEPT + i - (list ? before : 0), i < total);
      lists[k] = list;
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int i = begin + k * THREADS + at.lane;
      if (i >= total) continue;
      const u32 key = entries[k] >> 16;
      s.tokens[i] = lists[k] * a.span + (entries[k] & 0xFFFF), s.keys[i] = (u16)key;
      if (key != ABSENT) add_shared(&s.bins[max((int)key - first_key, 0)]);
    }
  }
}

// Write the chosen ones of `total` tokens in ascending order: those with keys below `last`, and the first `ties` of those
// with it. A warp has tokens that follow one another; token(i) is number i.
template <class Token>
DEVICE void write_chosen(Shared& s, const Place& at, const u16* keys, int total, u32 last, int ties, int* indices,
                         Token token) {
  const int each = (total + THREADS - 1) / THREADS * 32, begin = min(at.warp * each, total), end = min(begin + each, total);
  int less = 0, equal = 0;
#pragma unroll 1
  for (int i = begin + at.lane; i < end; i += 32) less += keys[i] < last, equal += keys[i] == last;
  less = warp_sum(less), equal = warp_sum(equal);
  if (at.lane == 0) s.warp_less[at.warp] = less, s.warp_equal[at.warp] = equal;
  sync_block();
  less = warp_sum(at.lane < at.warp ? s.warp_less[at.lane] : 0);
  equal = warp_sum(at.lane < at.warp ? s.warp_equal[at.lane] : 0);
  const u32 lanes_before = (1u << at.lane) - 1;
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const int i = first + at.lane;
    const u32 key = i < end ? keys[i] : ABSENT, lesses = warp_ballot(key < last), equals = warp_ballot(key == last);
    const int tied = equal + count_bits(equals & lanes_before);
    if (key < last || (key == last && tied < ties)) indices[less + count_bits(lesses & lanes_before) + min(tied, ties)] = token(i);
    less += count_bits(lesses), equal += count_bits(equals);
  }
}

// Choose `need` of the listed tokens. Returns whether they suffice, the same for all threads.
DEVICE bool choose_listed(Shared& s, const Arguments& a, const Place& at, int until, int total, int limit, int need,
                          int* indices) {
  const int first_key = max(limit - KEYS + 1, 0);
  load_kept(s, a, at, until, total, first_key);
  find_bin<KEYS>(s, at, s.bins, need);
  if (s.level == 0 || (s.edge == 0 && first_key > 0)) return false;
  write_chosen(s, at, s.keys, total, first_key + s.edge, need - s.above, indices, [&](int i) { return s.tokens[i]; });
  return true;
}

// Choose `need` of all tokens. `keys` has room for theirs.
DEVICE void choose_among_all(Shared& s, const Arguments& a, Place& at, u16* keys, int need, int* indices) {
  constexpr int LOWER = KEYS / 64;                        // keys of a bin
  at.pages = (at.candidates + PAGE - 1) / PAGE, at.sinks = a.sink_tokens, at.end = at.candidates;
  sync_block();
#pragma unroll 1
  for (int i = at.tid; i < KEYS; i += THREADS) s.bins[i] = 0;
  if (at.tid < LOWER) s.lower_bins[at.tid] = 0;
  if (SOFTMAX) merge_lse(s, a, at, load_scan_lse(a, at));
  sync_block();
  store_keys(s, at, found_of_pair(a, at.pair), keys, [&](u32 key) { add_shared(&s.bins[key / LOWER]); });
  find_bin<KEYS>(s, at, s.bins, need);
  const int edge = s.edge, left = need - s.above;
  sync_block();                                           // what was found is read
#pragma unroll 4
  for (int i = at.tid; i < at.candidates; i += THREADS)
    if (keys[i] / LOWER == edge) add_shared(&s.lower_bins[keys[i] % LOWER]);
  find_bin<LOWER>(s, at, s.lower_bins, left);
  write_chosen(s, at, keys, at.candidates, edge * LOWER + s.edge, left - s.above, indices, [](int i) { return i; });
}

KERNEL(choose_kept)(const Arguments a) {
  Shared& s = *(Shared*)dynamic_shared();
  static_assert(sizeof(Shared) <= FIXED_BYTES, "the launch asks for so many");
  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.pair = block_x();
#pragma unroll 1
  for (int i = at.tid; i < KEYS; i += THREADS) s.bins[i] = 0;
  // The kernels before, the scan and the one that listed, have waited for those before them: the bounds of rows are final.
  const int row = at.pair / a.kv_heads, length = min(max(a.seq_end[row] - a.seq_start[row], 0), a.num_tokens);
  at.candidates = max(length - 1, 0) / a.page_size * a.page_size;
  const int count = min(length, a.max_tokens), need = max(count - (length - at.candidates), 0);
  int* indices = a.block_indices + (long long)at.pair * a.max_tokens;
  sync_block();
  wait_for_previous_kernel();
  let_next_kernel_start();
  int until;
  const int total = count_kept(a, at, until), limit = a.kept_counts[(long long)at.pair * (a.lists + 1) + a.lists];
  bool done = need == 0;                                  // the same for all threads, like what follows
  if (!done && need <= total && total <= ROOM) done = choose_listed(s, a, at, until, total, limit, need, indices);
  if (!done) choose_among_all(s, a, at, a.keys + (long long)at.pair * ((a.num_tokens + PAGE - 1) / PAGE * PAGE), need, indices);
  write_rest(a, at, need, count);
}
