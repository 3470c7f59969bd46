// The choice of tokens by their scores, or by the estimates of a group's heads: one launch, for each row and KV head a
// cluster of CLUSTER blocks. Compiled with _cluster.cuh, codes/bits.cuh, _cluster_step.cuh, codes/choice.cuh and
// codes/found.cuh before it, their macros, and these: THREADS of a block; BLOCKS that a multiprocessor has registers for;
// FIXED_BYTES, set apart for Shared.

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
  int sinks, end;                                         // its tokens before these are sinks, and exist
};

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
  const int newest = length - at.candidates, count = min(length, a.max_tokens), need = max(count - newest, 0);
  int* indices = a.block_indices + (long long)at.pair * a.max_tokens;
  const int pages = (at.candidates + PAGE - 1) / PAGE, each = (pages + CLUSTER - 1) / CLUSTER;
  at.first_page = min(at.rank * each, pages), at.pages = min(each, pages - at.first_page);
  const int begin = at.first_page * PAGE;
  at.sinks = a.sink_tokens - begin, at.end = min(at.candidates - begin, at.pages * PAGE);
  if (SOFTMAX) merge_lse(s, a, at, load_scan_lse(a, at));
  sync_block();
  store_keys(s, at, found_of_pair(a, at.pair) + (long long)begin * TOKEN_BYTES, keys,
             [&](u32 key) { count_key(s.choice, key); });
  wait_cluster();                                         // all blocks run, and their barriers exist
  Among among;
  const Last last = find_last(s.choice, at, keys, need, s.barriers, among);
  emit_chosen(s.choice, at, among, last, [=](int n, int place) { indices[n] = begin + place; });
  if (at.rank == 0) write_rest(a, at, need, count);
}
